"""The pass over a checkpoint: read a layer, absorb it, store it, go on; one layer's weights in memory at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import torch

from mla_convert.absorption import Rounding
from mla_convert.checkpoint import Checkpoint
from mla_convert.coding import code_tensor
from mla_convert.conversion_report import ConversionReport, dtype_of, make_report
from mla_convert.destination import check_space, destination
from mla_convert.errors import UsageError
from mla_convert.manifest import Manifest, Source, SourceTensor, StoredLayer
from mla_convert.model_card import model_card
from mla_convert.paths import path_of
from mla_convert.products import make_whole, read_operands
from mla_convert.recipe import (
    PlannedLayer,
    check_options,
    parse_device,
    parse_dtype,
    parse_forms,
    plan_layers,
)
from mla_convert.schemes import parse_schemes
from mla_convert.writing import MAX_SHARD_BYTES, SidecarWriter

_SPARE_BYTES = 1 << 20  # manifest, index, card and journal, beside the tensors


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    dtype: str | torch.dtype = "source",
    quantize: str | None = None,
    qk_bits: int | None = None,
    vo_bits: int | None = None,
    group_size: int | str | None = None,
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
    ``quantize`` codes both sides, in ``int8`` (a scale per row), ``fp8`` or ``int4``; ``qk_bits`` and ``vo_bits`` (4, 8
    or 16, which leaves it plain) override it for one side; ``group_size`` is 32, 64 or 128 columns for int4, and for
    fp8 128 (blocks of 128×128) or ``row``. ``device`` is where products are formed. ``progress`` is called with the
    layers done and their number. With ``dry_run`` everything is checked and planned, and nothing written. An
    interrupted run is cleaned up and started from the beginning, whatever ``resume`` says.

    Raises UsageError for options and destinations that cannot be, SidecarError where writing fails, and whatever
    :meth:`Checkpoint.open` raises for the source. Nothing that is there is changed or overwritten.
    """
    started = time.perf_counter()
    if calibrate is not None:
        raise UsageError(f"calibrate={calibrate!r}: this version rounds to the nearest code; leave it out")
    qk_scheme, vo_scheme = parse_schemes(quantize, qk_bits, vo_bits, group_size)
    check_options(target, workers, max_shard_bytes)
    wanted = parse_forms(form, qk, vo)
    stored_dtype, where = parse_dtype(dtype), parse_device(device)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    planned = plan_layers(checkpoint, wanted, stored_dtype, {"qk": qk_scheme, "vo": vo_scheme})
    folder = destination(checkpoint.path, path_of(out, "OUT"), dry_run=dry_run)
    needed = sum(tensor.nbytes for layer in planned for tensor in layer.tensors.values())
    check_space(folder, needed + _SPARE_BYTES)
    stored: Sequence[StoredLayer] | None = None
    files: tuple[str, ...] = ()
    if not dry_run:
        stored, files = _write(checkpoint, planned, folder, where, progress, max_shard_bytes)
    return make_report(checkpoint, planned, folder, stored, files, time.perf_counter() - started)


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
    parts = [part for tensor in tensors for part in tensor.parts]
    with SidecarWriter(folder, parts, max_shard_bytes=max_shard_bytes) as writer:
        for done, layer in enumerate(planned, start=1):
            stored, read = _absorb(checkpoint, layer, device, writer)
            layers.append(stored)
            sources |= read
            if progress is not None:
                progress(done, len(planned))
        manifest = Manifest(_source(checkpoint, sources), tuple(layers), dtype_of(tensors))
        files = writer.finish(manifest.to_json(), model_card(manifest, checkpoint.raw_config))
    return layers, tuple(files)


def _absorb(
    checkpoint: Checkpoint, layer: PlannedLayer, device: torch.device, writer: SidecarWriter
) -> tuple[StoredLayer, dict[str, SourceTensor]]:
    """Make and write the tensors of one layer."""
    spec, stored = layer.spec, {}
    operands, sources = read_operands(checkpoint, layer, device)
    for key, planned in layer.tensors.items():
        if planned.scheme is not None:
            stored[key], parts = code_tensor(checkpoint, operands, spec, key, planned)
            for name, part in parts.items():
                writer.write(name, part)
            continue
        rounding = Rounding(planned.name)
        # Handed on without a name: one side's tensor is gone before the other's is made.
        writer.write(planned.name, make_whole(operands, spec.geometry, key, planned.dtype, rounding))
        stored[key] = dataclasses.replace(planned, largest_error=rounding.largest, frobenius_error=rounding.frobenius)
    return StoredLayer(spec.index, spec.geometry, layer.forms.qk, layer.forms.vo, stored, layer.sources), sources


def _source(checkpoint: Checkpoint, tensors: dict[str, SourceTensor]) -> Source:
    text = json.dumps(checkpoint.raw_config, sort_keys=True, separators=(",", ":")).encode()
    return Source(
        model_type=str(checkpoint.config["model_type"]),
        layout=checkpoint.layout,
        config_sha256=hashlib.sha256(text).hexdigest(),
        tensors=tensors,
    )
