"""The pass over a checkpoint: read a layer, absorb it, store it, go on; one layer's weights in memory at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mla_convert.absorption import (
    Form,
    Rounding,
    SideReads,
    fuse_ov,
    fuse_qk,
    reads,
    slice_rows,
    split_kv_b,
)
from mla_convert.architectures import LayerSpec
from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import CARD, check_space, destination
from mla_convert.formats import plain
from mla_convert.manifest import Manifest, Source, SourceTensor, StoredLayer, StoredTensor
from mla_convert.model_card import model_card
from mla_convert.recipe import (
    PlannedLayer,
    Side,
    check_options,
    parse_device,
    parse_dtype,
    parse_form,
    plan_layers,
    refuse_later_options,
)
from mla_convert.storage import describe_source
from mla_convert.writing import MAX_SHARD_BYTES, SidecarWriter

_SPARE_BYTES = 1 << 20  # manifest, index, card and journal, beside the tensors


@dataclasses.dataclass(frozen=True)
class SideReport:
    """One side in all layers: its form (``mixed`` where layers differ), and what a decode step reads in either form.

    The figures are numbers, summed over the layers, from the weights of that side alone.
    """

    form: Literal["factored", "fused", "mixed"]
    factored: int
    fused: int


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, or would do when ``dry_run``.

    ``out`` is the folder that the files are in. ``bytes_in`` counts the source tensors as stored, ``bytes_out`` the
    data of the stored ones. ``largest_error`` is the largest rounding error of any tensor, relative to its largest
    magnitude, and ``largest_error_tensor`` that tensor's name; 0 and None where every tensor is an exact slice, and
    None and None for a dry run.
    """

    source: str
    out: str
    layers: int
    dtype: str
    qk: SideReport
    vo: SideReport
    bytes_in: int
    bytes_out: int
    seconds: float
    largest_error: float | None
    largest_error_tensor: str | None
    files: tuple[str, ...]
    notes: tuple[str, ...]
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    dtype: str | torch.dtype = "source",
    quantize: None = None,
    qk_bits: None = None,
    vo_bits: None = None,
    group_size: None = None,
    calibrate: None = None,
    target: str = "sidecar",
    workers: int | None = None,
    resume: bool = True,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ConversionReport:
    """Precompute the absorbed weights of a checkpoint and store them beside it, or in a folder of their own.

    ``source`` is the checkpoint's folder, ``out`` the folder to write (``source`` itself means its subfolder
    ``mla_absorbed``). ``form`` is ``factored``, ``fused`` or ``auto``, for both sides, and ``qk`` and ``vo`` override
    it for the key side and the value side; ``auto`` takes what reads fewer numbers per decode step. ``dtype`` is that
    of the stored weights: ``source`` (of a quantized source: the config's), ``bfloat16``, ``float16`` or ``float32``.
    ``device`` is where products are formed. ``progress`` is called with the layers done and their number. With
    ``dry_run`` everything is checked and planned, and nothing written. An interrupted run is cleaned up and started
    from the beginning, whatever ``resume`` says.

    Raises UsageError for options and destinations that cannot be, SidecarError where writing fails, and whatever
    :meth:`Checkpoint.open` raises for the source. Nothing that is there is changed or overwritten.
    """
    started = time.perf_counter()
    refuse_later_options(
        quantize=quantize, qk_bits=qk_bits, vo_bits=vo_bits, group_size=group_size, calibrate=calibrate
    )
    check_options(target, workers, max_shard_bytes)
    wanted: dict[Side, str] = {
        "qk": parse_form(qk if qk is not None else form, "qk"),
        "vo": parse_form(vo if vo is not None else form, "vo"),
    }
    stored_dtype, where = parse_dtype(dtype), parse_device(device)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    planned = plan_layers(checkpoint, wanted, stored_dtype)
    folder = destination(checkpoint.path, pathlib.Path(out))
    needed = sum(tensor.nbytes for layer in planned for tensor in layer.tensors.values())
    check_space(folder, needed + _SPARE_BYTES)
    stored: Sequence[StoredLayer] | None = None
    files: tuple[str, ...] = ()
    if not dry_run:
        stored, files = _write(checkpoint, planned, folder, where, progress, max_shard_bytes)
    return _report(checkpoint, planned, folder, stored, files, time.perf_counter() - started)


def _write(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedLayer],
    folder: pathlib.Path,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    max_shard_bytes: int,
) -> tuple[list[StoredLayer], tuple[str, ...]]:
    layers: list[StoredLayer] = []
    sources: dict[str, SourceTensor] = {}
    tensors = [tensor for layer in planned for tensor in layer.tensors.values()]
    with SidecarWriter(folder, tensors, max_shard_bytes=max_shard_bytes) as writer:
        for done, layer in enumerate(planned, start=1):
            sources.update((name, describe_source(checkpoint, name)) for name in layer.sources)
            layers.append(_absorb(checkpoint, layer, device, writer))
            if progress is not None:
                progress(done, len(planned))
        manifest = Manifest(_source(checkpoint, sources), tuple(layers), _dtype_of(tensors))
        files = writer.finish(manifest.to_json(), model_card(manifest, checkpoint.raw_config))
    return layers, tuple(files)


def _absorb(checkpoint: Checkpoint, layer: PlannedLayer, device: torch.device, writer: SidecarWriter) -> StoredLayer:
    """Make and write the tensors of one layer."""
    spec, stored = layer.spec, {}
    kv_b = _operand(checkpoint, spec.kv_b, device)
    for key, planned in layer.tensors.items():
        rounding = Rounding(planned.name)
        # Handed on without a name: one side's tensor is gone before the other's is made.
        writer.write(planned.name, _make(checkpoint, spec, key, kv_b, planned.dtype, rounding))
        stored[key] = dataclasses.replace(planned, largest_error=rounding.largest, frobenius_error=rounding.frobenius)
    return StoredLayer(spec.index, spec.geometry, layer.forms.qk, layer.forms.vo, stored, layer.sources)


def _make(
    checkpoint: Checkpoint, spec: LayerSpec, key: str, kv_b: Tensor, dtype: torch.dtype, rounding: Rounding
) -> Tensor:
    w_uk, w_uv = split_kv_b(kv_b, spec.geometry)
    if key == "qk":
        return fuse_qk(w_uk, _operand(checkpoint, spec.query, kv_b.device), spec.geometry, dtype, rounding)
    if key == "ov":
        return fuse_ov(w_uv, _operand(checkpoint, spec.o, kv_b.device), spec.geometry, dtype, rounding)
    return slice_rows(w_uk if key == "k_b" else w_uv, dtype, rounding)


def _operand(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensor:
    """A source weight as products take it: FP8 blocks in float32, so that only the result is rounded."""
    return checkpoint.weight(name, torch.float32 if checkpoint.quantized(name) else None).to(device)


def _source(checkpoint: Checkpoint, tensors: dict[str, SourceTensor]) -> Source:
    text = json.dumps(checkpoint.raw_config, sort_keys=True, separators=(",", ":")).encode()
    return Source(
        model_type=str(checkpoint.config["model_type"]),
        layout=checkpoint.layout,
        config_sha256=hashlib.sha256(text).hexdigest(),
        tensors=tensors,
    )


def _report(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedLayer],
    folder: pathlib.Path,
    stored: Sequence[StoredLayer] | None,
    files: tuple[str, ...],
    seconds: float,
) -> ConversionReport:
    tensors = [tensor for layer in planned for tensor in layer.tensors.values()]
    done = [tensor for layer in stored or () for tensor in layer.tensors.values()]
    worst = max(done, key=lambda tensor: tensor.largest_error, default=None)
    return ConversionReport(
        source=str(checkpoint.path),
        out=str(folder),
        layers=len(planned),
        dtype=_dtype_of(tensors),
        qk=_side([layer.forms.qk for layer in planned], [reads(layer.spec.geometry).qk for layer in planned]),
        vo=_side([layer.forms.vo for layer in planned], [reads(layer.spec.geometry).vo for layer in planned]),
        bytes_in=sum(_stored_bytes(checkpoint, name) for layer in planned for name in layer.sources),
        bytes_out=sum(tensor.nbytes for tensor in tensors),
        seconds=seconds,
        largest_error=worst.largest_error if worst else None,
        largest_error_tensor=worst.name if worst and worst.largest_error else None,
        files=files,
        notes=tuple(_notes(checkpoint, folder, stored, files)),
        dry_run=stored is None,
    )


def _notes(
    checkpoint: Checkpoint, folder: pathlib.Path, stored: Sequence[StoredLayer] | None, files: tuple[str, ...]
) -> Iterable[str]:
    if checkpoint.extra_layers:
        numbers = ", ".join(str(spec.index) for spec in checkpoint.extra_layers)
        yield f"layer {numbers}, for multi-token prediction, is absorbed too"
    if checkpoint.quantization is not None:
        yield "FP8 blocks of the source were dequantized in float32 and the result rounded once"
    if stored is not None and CARD not in files:
        yield f"{folder} already has a {CARD}; it was left as it is, and no model card was written"


def _side(forms: Sequence[Form], figures: Sequence[SideReads]) -> SideReport:
    return SideReport(
        form=forms[0] if len(set(forms)) == 1 else "mixed",
        factored=sum(figure.factored for figure in figures),
        fused=sum(figure.fused for figure in figures),
    )


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    names = [name] + [scale for scale in [checkpoint.scale_name(name)] if scale is not None]
    infos = [checkpoint.info(each) for each in names]
    return sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in infos)


def _dtype_of(tensors: Iterable[StoredTensor]) -> str:
    names = sorted({plain(tensor.dtype) for tensor in tensors})
    return names[0] if len(names) == 1 else "mixed"
