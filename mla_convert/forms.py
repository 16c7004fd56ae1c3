"""The two forms of absorbed weights, and which of them reads fewer numbers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mla_convert.geometry import MLAGeometry

Form = Literal["factored", "fused"]
FORMS: tuple[Form, ...] = ("factored", "fused")


@dataclasses.dataclass(frozen=True)
class Forms:
    """The form of each side of one layer."""

    qk: Form
    vo: Form


@dataclasses.dataclass(frozen=True)
class SideReads:
    """Numbers that one side of one layer reads from its weights in a decode step, in either form."""

    factored: int
    fused: int

    @property
    def fewer(self) -> Form:
        """The form that reads fewer; factored where they are equal, since it is exact."""
        return "fused" if self.fused < self.factored else "factored"


@dataclasses.dataclass(frozen=True)
class Reads:
    """The figures of both sides of one layer."""

    qk: SideReads
    vo: SideReads


def reads(g: MLAGeometry) -> Reads:
    """Numbers read per decode step from one layer's weights, per side and form (:mod:`mla_convert.absorption`)."""
    return Reads(
        qk=SideReads(
            factored=g.num_heads * g.qk_nope_head_dim * (g.kv_lora_rank + g.query_rank),
            fused=g.num_heads * g.kv_lora_rank * g.query_rank,
        ),
        vo=SideReads(
            factored=g.num_heads * g.v_head_dim * (g.hidden_size + g.kv_lora_rank),
            fused=g.hidden_size * g.num_heads * g.kv_lora_rank,
        ),
    )


def choose_form(g: MLAGeometry) -> Forms:
    """For each side alone the form that reads fewer numbers per decode step."""
    figures = reads(g)
    return Forms(qk=figures.qk.fewer, vo=figures.vo.fewer)
