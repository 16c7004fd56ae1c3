"""What an inspection found, as data, as tables, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mla_convert.geometry import MLAGeometry
from mla_convert.recipe import Side
from mla_convert.units import format_bytes

SIDES: tuple[tuple[Side, str], ...] = (("qk", "key side"), ("vo", "value side"))


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
        reasons = [(name, getattr(d, f"not_fused_{side}")) for d in source.dimensions for side, name in SIDES]
        facts |= {f"the {name} is not fused": reason for name, reason in reasons if reason}
    return facts


def _ranges(numbers: Sequence[int]) -> str:
    """``0–60`` for numbers in a row, with commas between runs."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs) or "none"
