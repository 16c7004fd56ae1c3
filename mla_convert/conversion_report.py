"""What a conversion says of itself when it is done, or of what it would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from mla_convert.checkpoint import Checkpoint
from mla_convert.coding import takes_over
from mla_convert.destination import free_space
from mla_convert.formats import plain
from mla_convert.forms import Form, SideReads, reads
from mla_convert.manifest import Manifest, StoredTensor, quantization_of
from mla_convert.order import Order
from mla_convert.quality_report import QualityReport
from mla_convert.recipe import PlannedLayer
from mla_convert.sidecar import dtype_of


@dataclasses.dataclass(frozen=True)
class SideReport:
    """One side in all layers: its form (``mixed`` where layers differ), and what a decode step reads in either form.

    The figures are numbers, summed over the layers, from the weights of that side alone.
    """

    form: Literal["factored", "fused", "mixed"]
    factored: int
    fused: int


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """A coded weight: how, what that cost against its float32 numbers, and its bytes with and without.

    ``relative_error`` is the norm of the difference over the norm, ``signal_to_noise`` the same in decibels (None where
    nothing was lost); ``rounding`` says how the codes were chosen.
    """

    name: str
    scheme: str
    rounding: str
    relative_error: float
    largest_error: float
    signal_to_noise: float | None
    bytes: int
    plain_bytes: int

    def row(self) -> list[str]:
        """Cells for people."""
        noise = "lossless" if self.signal_to_noise is None else f"{self.signal_to_noise:.1f} dB"
        error = f"{self.relative_error:.2e}"
        return [self.name, self.scheme, self.rounding, error, noise, f"{self.bytes:,}", f"{self.plain_bytes:,}"]


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, or would do when ``dry_run``.

    ``out`` is the folder that the files are in, ``target`` what they are. ``dtype`` is that of plain absorbed weights,
    and ``stored_as`` says in words what they are kept in, codes included. ``qk`` and ``vo`` are None where nothing was
    absorbed, only laid out anew. ``bytes_in`` counts the source tensors as stored, ``bytes_out`` the
    data of the stored ones, and ``bytes_free`` what the disk of ``out`` has left; ``bytes_kept`` are read
    from the hub and kept in the folder ``kept_in``. ``largest_error`` is the largest
    rounding error of any tensor, relative to its largest magnitude, and ``largest_error_tensor`` that tensor's name; 0
    and None where every tensor is an exact slice, and None and None for a dry run. ``quantization`` is in
    compressed-tensors' terms, and ``tensors`` has the figures of every coded weight; ``quality`` says what
    they cost on held-out text, where the model was run.
    """

    source: str
    out: str
    target: str
    layers: int
    dtype: str
    stored_as: str
    qk: SideReport | None
    vo: SideReport | None
    bytes_in: int
    bytes_out: int
    bytes_free: int
    bytes_kept: int
    kept_in: str | None
    seconds: float
    largest_error: float | None
    largest_error_tensor: str | None
    files: tuple[str, ...]
    notes: tuple[str, ...]
    dry_run: bool = False
    quantization: dict[str, Any] | None = None
    tensors: tuple[TensorReport, ...] = ()
    quality: QualityReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def tensor_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of a table of the coded weights."""
        columns = ["weight", "codes", "rounding", "relative error", "signal to noise", "bytes", "plain"]
        return columns, [tensor.row() for tensor in self.tensors]


def make_report(
    order: Order,
    manifest: Manifest | None,
    files: Sequence[str],
    *,
    notes: Iterable[str],
    seconds: float,
    dry_run: bool,
) -> ConversionReport:
    """The report of ``order``; ``manifest`` is of the absorbed weights that were stored, None where none were."""
    planned, checkpoint = order.planned, order.checkpoint
    tensors = [tensor for layer in planned for tensor in layer.tensors.values()]
    done = [] if manifest is None else list(manifest.tensors.values())
    dtype = dtype_of(tensors) if tensors else plain(checkpoint.source_dtype(checkpoint.layers[0].kv_b))
    worst = max(done, key=lambda tensor: tensor.largest_error, default=None)
    return ConversionReport(
        source=str(checkpoint.path),
        out=str(order.goal.folder),
        target=order.target,
        layers=len(planned) or len(checkpoint.layers),
        dtype=dtype,
        stored_as=" and ".join(dict.fromkeys(_kept_in(tensor) for tensor in tensors)) or dtype,
        qk=_side([layer.forms.qk for layer in planned], [reads(layer.spec.geometry).qk for layer in planned]),
        vo=_side([layer.forms.vo for layer in planned], [reads(layer.spec.geometry).vo for layer in planned]),
        bytes_in=order.bytes_in,
        bytes_out=order.bytes_out,
        bytes_free=free_space(order.goal.folder),
        bytes_kept=order.bytes_kept,
        kept_in=None if order.kept_in is None else str(order.kept_in),
        seconds=seconds,
        largest_error=worst.largest_error if worst else None,
        largest_error_tensor=worst.name if worst and worst.largest_error else None,
        files=tuple(files),
        notes=(*_notes(order), *order.notes, *notes),
        dry_run=dry_run,
        quantization=quantization_of(tensors),
        tensors=tuple(_tensor(tensor) for tensor in done if tensor.scheme is not None),
    )


def _kept_in(tensor: StoredTensor) -> str:
    return plain(tensor.dtype) if tensor.scheme is None else str(tensor.scheme)


def _tensor(tensor: StoredTensor) -> TensorReport:
    return TensorReport(
        name=tensor.name,
        scheme=str(tensor.scheme),
        rounding=tensor.rounding,
        relative_error=tensor.frobenius_error,
        largest_error=tensor.largest_error,
        signal_to_noise=tensor.signal_to_noise if tensor.frobenius_error else None,
        bytes=tensor.nbytes,
        plain_bytes=dataclasses.replace(tensor, scheme=None).nbytes,
    )


def _notes(order: Order) -> Iterable[str]:
    if not order.planned:
        return
    checkpoint = order.checkpoint
    if checkpoint.extra_layers:
        numbers = ", ".join(str(spec.index) for spec in checkpoint.extra_layers)
        yield f"layer {numbers}, for multi-token prediction, is absorbed too"
    sliced = sum(_taken_over(checkpoint, layer, key) for layer in order.planned for key in layer.tensors)
    if sliced:
        yield (
            f"the FP8 blocks of the source line up with the slices of kv_b_proj: the codes and scales of {sliced} "
            "tensors are the source's own, without loss"
        )
    labels = dict.fromkeys(_dequantized(checkpoint, order.planned))
    if labels:
        which = "all other codes of the source" if sliced else "codes of the source"
        yield f"{which} ({'; '.join(labels)}) were dequantized in float32 and the result rounded once"


def _taken_over(checkpoint: Checkpoint, layer: PlannedLayer, key: str) -> bool:
    scheme = layer.tensors[key].scheme
    return scheme is not None and takes_over(checkpoint, layer.spec, key, scheme)


def _dequantized(checkpoint: Checkpoint, planned: Sequence[PlannedLayer]) -> Iterable[str]:
    """How the source tensors are coded that some absorbed weight is computed from."""
    for layer in planned:
        if all(_taken_over(checkpoint, layer, key) for key in layer.tensors):
            continue
        schemes = (checkpoint.scheme(name) for name in layer.sources)
        yield from (scheme.label for scheme in schemes if scheme is not None)


def _side(forms: Sequence[Form], figures: Sequence[SideReads]) -> SideReport | None:
    if not forms:
        return None
    return SideReport(
        form=forms[0] if len(set(forms)) == 1 else "mixed",
        factored=sum(figure.factored for figure in figures),
        fused=sum(figure.fused for figure in figures),
    )
