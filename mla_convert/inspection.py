"""What a checkpoint, or a folder of absorbed weights, is and what is wrong with it; from config and headers alone."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from mla_convert.architectures import LayerSpec, find_family, layer_specs, normalize_config
from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import FOLDER, MANIFEST
from mla_convert.errors import MLAConvertError, UnsupportedModelError
from mla_convert.folders import open_folder, read_config
from mla_convert.formats import plain
from mla_convert.geometry import MLAGeometry
from mla_convert.hub import HubPath
from mla_convert.paths import path_of
from mla_convert.quantization_config import stands_for
from mla_convert.quantized import split_name
from mla_convert.recipe import Side, plan_layers
from mla_convert.shards import is_readable
from mla_convert.storage import AbsorbedCheckpoint
from mla_convert.units import format_bytes

_SIDES: tuple[tuple[Side, str], ...] = (("qk", "key side"), ("vo", "value side"))


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Layers of one geometry, by their numbers, and why the family's key or value side cannot be fused, if so."""

    layers: tuple[int, ...]
    geometry: MLAGeometry
    not_fused_qk: str
    not_fused_vo: str


@dataclasses.dataclass(frozen=True)
class TensorKind:
    """The tensors of one name: shape, how they are stored, in how many layers, and their bytes together."""

    name: str
    shape: tuple[int, ...]
    stored: str
    layers: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What would be stored, in bytes and the source's dtype: of ``auto``, with its form per side, and of each form.

    None where the family does not allow it.
    """

    qk: str
    vo: str
    auto: int
    factored: int
    fused: int | None


@dataclasses.dataclass(frozen=True)
class SourceFacts:
    """A checkpoint. ``bytes`` is of all tensors and ``bytes_attention`` of those that the attention layers need."""

    model_type: str
    layout: str | None
    dimensions: tuple[Dimensions, ...]
    extra_layers: tuple[int, ...]
    quantization: str | None
    tensors: int
    bytes: int
    bytes_attention: int
    kinds: tuple[TensorKind, ...]
    conversion: Conversion | None


@dataclasses.dataclass(frozen=True)
class AbsorbedFacts:
    """Absorbed weights: the folder, from what kind of model they were made, and each kind of stored tensor."""

    folder: str
    model_type: str
    tool_version: str
    dtype: str
    layers: tuple[int, ...]
    qk: str
    vo: str
    source_forms: tuple[str, ...]
    bytes: int
    kinds: tuple[TensorKind, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found. ``problems`` keep it from being used, ``notes`` do not. ``str()`` is a summary in lines."""

    path: str
    source: SourceFacts | None
    absorbed: AbsorbedFacts | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def facts(self) -> dict[str, str]:
        """What is not in a table, by name."""
        facts = {"path": self.path}
        if self.source is not None:
            facts |= _source_facts(self.source)
        if self.absorbed is not None:
            a = self.absorbed
            facts |= {
                "absorbed weights": f"{a.folder}: layers {_ranges(a.layers)} of a {a.model_type} model, by "
                f"mla_convert {a.tool_version}",
                "stored": f"key side {a.qk}, value side {a.vo}, in {a.dtype}, {format_bytes(a.bytes)}",
                "made from": "; ".join(a.source_forms),
            }
        return facts

    def dimension_rows(self) -> list[list[str]]:
        """A row for each geometry: layers, then D, H, Q, C, N, R, V."""
        rows = []
        for each in self.source.dimensions if self.source is not None else ():
            g = each.geometry
            sizes = (g.hidden_size, g.num_heads, g.q_lora_rank or "–", g.kv_lora_rank)
            heads = (g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim)
            rows.append([_ranges(each.layers), *map(str, (*sizes, *heads))])
        return rows

    def kind_rows(self) -> list[list[str]]:
        """A row for each kind of tensor: name, shape, how it is stored, layers, bytes."""
        kinds = [kind for part in (self.source, self.absorbed) if part is not None for kind in part.kinds]
        return [
            [kind.name, "×".join(map(str, kind.shape)), kind.stored, str(kind.layers), format_bytes(kind.bytes)]
            for kind in kinds
        ]

    def __str__(self) -> str:
        return "\n".join([*(f"{name}: {value}" for name, value in self.facts().items()), *self.problems, *self.notes])


def inspect_checkpoint(source: str | os.PathLike[str]) -> Inspection:
    """Look at a checkpoint folder, a hub repository, or a folder that ``convert`` wrote; reads no weights.

    What is wrong with it is in the result. Raises CheckpointError where there is nothing of the kind to look at.
    """
    path = open_folder(path_of(source, "SOURCE"))
    problems: list[str] = []
    notes: list[str] = []
    manifest = None if isinstance(path, HubPath) else _manifest_folder(path)
    facts = None
    if manifest is None or is_readable(path / "config.json"):
        facts = _inspect_source(path, problems, notes)
    absorbed = None if manifest is None else _inspect_absorbed(manifest, problems)
    return Inspection(str(path), facts, absorbed, tuple(problems), tuple(notes))


def _manifest_folder(path: pathlib.Path) -> pathlib.Path | None:
    places = (path, path / FOLDER)
    return next((place for place in places if (place / MANIFEST).is_file()), None)


def _inspect_source(path: pathlib.Path, problems: list[str], notes: list[str]) -> SourceFacts | None:
    raw = read_config(path)  # without it there is nothing to look at
    try:
        config = normalize_config(raw)
        family, specs = find_family(config), layer_specs(config)
    except UnsupportedModelError as error:
        problems.append(str(error))
        return None
    try:
        checkpoint = Checkpoint.open(path)
    except MLAConvertError as error:
        problems.append(str(error))
        dimensions = _dimensions(specs)
        return SourceFacts(family.model_type, None, dimensions, (), None, 0, 0, 0, (), None)
    notes += _notes(checkpoint)
    layers = (*checkpoint.layers, *checkpoint.extra_layers)
    names = [name for spec in layers for name in spec.shapes()]
    quantization = checkpoint.quantization
    return SourceFacts(
        model_type=family.model_type,
        layout=checkpoint.layout,
        dimensions=_dimensions(layers),
        extra_layers=tuple(spec.index for spec in checkpoint.extra_layers),
        quantization=None if quantization is None else quantization.method,
        tensors=len(checkpoint.names()),
        bytes=sum(map(checkpoint.stored_bytes, checkpoint.weight_names())),
        bytes_attention=sum(map(checkpoint.stored_bytes, names)),
        kinds=_source_kinds(checkpoint, names),
        conversion=_conversion(checkpoint, problems),
    )


def _dimensions(specs: Iterable[LayerSpec]) -> tuple[Dimensions, ...]:
    found: dict[tuple[MLAGeometry, str, str], list[int]] = {}
    for spec in specs:
        reasons = spec.family.between("qk"), spec.family.between("vo")
        found.setdefault((spec.geometry, *reasons), []).append(spec.index)
    return tuple(Dimensions(tuple(layers), *key) for key, layers in found.items())


def _source_kinds(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[TensorKind, ...]:
    def stored(name: str) -> str:
        scheme = checkpoint.scheme(name)
        return plain(checkpoint.info(name).dtype) if scheme is None else scheme.label

    entries = ((name, checkpoint.info(name).shape, stored(name), checkpoint.stored_bytes(name)) for name in names)
    return _kinds(entries)


def _kinds(entries: Iterable[tuple[str, tuple[int, ...], str, int]]) -> tuple[TensorKind, ...]:
    found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for name, shape, stored, nbytes in entries:
        found.setdefault((split_name(name)[0].rpartition(".")[2], shape, stored), []).append(nbytes)
    return tuple(TensorKind(*key, layers=len(sizes), bytes=sum(sizes)) for key, sizes in found.items())


def _conversion(checkpoint: Checkpoint, problems: list[str]) -> Conversion | None:
    def size(form: str) -> int:
        planned = plan_layers(checkpoint, {"qk": form, "vo": form}, None)
        return sum(tensor.nbytes for layer in planned for tensor in layer.tensors.values())

    try:
        planned = plan_layers(checkpoint, {"qk": "auto", "vo": "auto"}, None)
        qk, vo = (_one_of([getattr(layer.forms, side) for layer in planned]) for side, _ in _SIDES)
        fusable = not any(spec.family.between(side) for spec in checkpoint.layers for side, _ in _SIDES)
        return Conversion(qk, vo, size("auto"), size("factored"), size("fused") if fusable else None)
    except MLAConvertError as error:
        problems.append(str(error))
        return None


def _notes(checkpoint: Checkpoint) -> Iterable[str]:
    quantization = checkpoint.quantization
    if quantization is None:
        return
    if quantization.unreadable:
        yield f"the attention is plain and can be converted; the rest cannot be loaded: {quantization.unreadable}"
    modules = {split_name(name)[0] for name in checkpoint.names()}
    unmatched = [entry for entry in quantization.ignored if not any(stands_for(entry, module) for module in modules)]
    if unmatched:
        yield f"the config's quantization_config lists modules that are not there: {', '.join(unmatched[:5])}"


def _inspect_absorbed(folder: pathlib.Path, problems: list[str]) -> AbsorbedFacts | None:
    try:
        store = AbsorbedCheckpoint.open(folder)
    except MLAConvertError as error:
        problems.append(str(error))
        return None
    manifest = store.manifest
    tensors = manifest.tensors.values()
    stored = ((t.name, t.shape, plain(t.dtype) if t.scheme is None else str(t.scheme), t.nbytes) for t in tensors)
    forms = dict.fromkeys(tensor.form or tensor.dtype for tensor in manifest.source.tensors.values())
    return AbsorbedFacts(
        folder=str(store.path),
        model_type=manifest.source.model_type,
        tool_version=manifest.tool_version,
        dtype=manifest.dtype,
        layers=tuple(store.layers),
        qk=_one_of([layer.qk for layer in manifest.layers]),
        vo=_one_of([layer.vo for layer in manifest.layers]),
        source_forms=tuple(forms),
        bytes=sum(tensor.nbytes for tensor in tensors),
        kinds=_kinds(stored),
    )


def _source_facts(source: SourceFacts) -> dict[str, str]:
    facts = {"model": f"{source.model_type}, layers {_ranges([n for d in source.dimensions for n in d.layers])}"}
    if source.layout is None:
        return facts
    facts["layout"] = f"{source.layout}, {source.tensors:,} tensors, {format_bytes(source.bytes)}"
    facts["attention"] = f"{format_bytes(source.bytes_attention)}" + (
        f", quantization: {source.quantization}" if source.quantization else ""
    )
    if source.conversion is not None:
        c = source.conversion
        fused = "cannot be fused" if c.fused is None else f"fused {format_bytes(c.fused)}"
        facts["to convert"] = (
            f"auto: key side {c.qk}, value side {c.vo}, {format_bytes(c.auto)} (factored {format_bytes(c.factored)}, "
            f"{fused})"
        )
        reasons = [(name, getattr(d, f"not_fused_{side}")) for d in source.dimensions for side, name in _SIDES]
        facts |= {f"the {name} is not fused": reason for name, reason in reasons if reason}
    return facts


def _one_of(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else "mixed"


def _ranges(numbers: Sequence[int]) -> str:
    """``0–60`` for numbers in a row, with commas between runs."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs) or "none"
