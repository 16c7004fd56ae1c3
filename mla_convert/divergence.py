"""How far apart two sets of logits are, position by position: pure functions on tensors.

One position is one row of logits [vocabulary]. The reference is always the first argument.

- **difference**: the largest |Δlogit| of the row; **relative**: the same over the row's range, the reference's largest
  logit minus its smallest. A row's own range, not that of all rows: the strictest reading of "relative to the range".
- **KL**: Σ p·(ln p − ln q) in nats, p the reference's probabilities and q the other's, in float64.
- **top-1**: whether both rows have their largest logit in the same place.

Anything that is not a number in a row makes that row's figures NaN, and NaN lies within no bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

#: Rows worked on at once: float64 copies of a large vocabulary are many times larger than the logits themselves.
_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Figures of n positions, one number each: ``difference``, ``relative``, ``kl`` float64 [n]; ``agrees`` bool [n].

    ``places`` int64 [n, 2] says which sequence and which token a position is, ``rerouted`` bool [n] where a router
    picked other experts than in the reference.
    """

    difference: Tensor
    relative: Tensor
    kl: Tensor
    agrees: Tensor
    places: Tensor
    rerouted: Tensor

    @property
    def settled_kl(self) -> Tensor:
        """KL where the routers picked the reference's experts."""
        return self.kl[~self.rerouted]

    def summary(self) -> Distance:
        """Figures over all positions."""
        settled = self.relative[~self.rerouted]
        worst = int(self.relative.argmax())  # NaN counts as the largest
        return Distance(
            largest_difference=float(self.difference.max()),
            largest_relative=float(self.relative.max()),
            largest_relative_settled=float(settled.max()) if len(settled) else 0.0,
            median_kl=quantile(self.settled_kl, 0.5),
            p99_kl=quantile(self.settled_kl, 0.99),
            mean_kl=float(self.kl.mean()),
            largest_kl=float(self.kl.max()),
            top1_agreement=float(self.agrees.double().mean()),
            rerouted=int(self.rerouted.sum()),
            worst_sequence=int(self.places[worst, 0]),
            worst_token=int(self.places[worst, 1]),
        )


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one model is from the reference, over all positions of a stage.

    ``largest_relative`` is in units of the reference's range of logits at that position, and stands at
    ``worst_sequence`` and ``worst_token``; KL is in nats per position; ``top1_agreement`` is a share of the positions.
    ``rerouted`` counts the positions at which some router picked other experts: ``largest_relative_settled``,
    ``median_kl`` and ``p99_kl`` are taken over all the others.
    """

    largest_difference: float
    largest_relative: float
    largest_relative_settled: float
    median_kl: float
    p99_kl: float
    mean_kl: float
    largest_kl: float
    top1_agreement: float
    rerouted: int
    worst_sequence: int
    worst_token: int


def compare(reference: Tensor, tested: Tensor, real: Tensor, rerouted: Tensor) -> Divergence:
    """Compare logits [B, S, vocabulary] at the positions where ``real`` bool [B, S] is true.

    ``rerouted`` bool [B, S]: where a router picked other experts.
    """
    places = real.nonzero()
    parts = []
    for begin in range(0, len(places), _ROWS):
        chosen = places[begin : begin + _ROWS]
        where = (chosen[:, 0], chosen[:, 1])
        parts.append(_compare_rows(reference[where].double(), tested[where].double()))
    difference, relative, kl, agrees = (torch.cat(column) for column in zip(*parts, strict=True))
    return Divergence(difference, relative, kl, agrees, places, rerouted[real])


def _compare_rows(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four figures of rows [n, vocabulary] in float64."""
    # Equal infinities (a masked vocabulary) are no difference.
    difference = torch.where(p == q, 0.0, (p - q).abs()).amax(dim=-1)
    spread = p.amax(dim=-1) - _lowest_finite(p)
    relative = torch.where(difference == 0, 0.0, difference / spread)
    return difference, relative, kl_divergence(p, q), p.argmax(dim=-1) == q.argmax(dim=-1)


def _lowest_finite(rows: Tensor) -> Tensor:
    return torch.where(rows.isneginf(), math.inf, rows).amin(dim=-1)


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p ‖ q) in nats of each row, [n] for logits [n, vocabulary]; what has no probability under p adds nothing."""
    log_p, log_q = p_logits.log_softmax(dim=-1), q_logits.log_softmax(dim=-1)
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    return terms.sum(dim=-1).clamp(min=0)  # rounding leaves equal rows a little below zero


def largest(figures: Iterable[float]) -> float:
    """The largest of several figures; NaN counts as that, which ``max`` would pass over."""
    return max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure)


def quantile(values: Tensor, share: float) -> float:
    """The value below which ``share`` of [n] lie, interpolated; ``share`` is clipped to 0 … 1. NaN where n is 0."""
    if not len(values):
        return math.nan
    return float(torch.quantile(values, min(1.0, max(0.0, share))))
