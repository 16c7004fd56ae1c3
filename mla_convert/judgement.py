"""Figures into a verdict: the two rules, and the report that says which figure broke which bound, and where.

The floor rule compares two samples: the KL of the patched model and that of the floor, each against the float32
original, over the same positions. A position at which a router picked other experts than the original is counted
apart: its KL is a hundred times that of others, and about 1 % are such, just where the 99th percentile lies.
With them that percentile differs by a factor of 0.6 to 1.8 between correct models (4,096 positions of the example in
bfloat16), without them by 0.9 to 1.15. What must not hide among them is held by their number.

Numbers of a sample scatter. Of n positions, the share that lies below the true quantile p has the deviation
√(p(1 − p)/n). From :data:`MINIMUM` positions on, quantiles are compared as they are. In a stage of fewer, the quantile
three deviations below p has to lie within the bound of the floor's three deviations above p. A quantile with fewer than
nine positions beyond it, whose number scatters by more than itself, is not judged. Counts, which are small, always have
three deviations of their difference: those of rerouted positions, and those in top-1 agreement. There the two models
are compared at the same positions, so that only those count at which one of them agrees with the original and the other
does not. Of d such positions the difference scatters by √d: with 98 % agreement on 4,096 positions, by as much as half
of what it may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

from mla_convert.divergence import Distance, Divergence, quantile
from mla_convert.jsonable import jsonable
from mla_convert.stages import Calls, Stage

#: Largest logit difference of a float32 model, in units of the original's range of logits at that position.
STRICT = 1e-4
#: Median and 99th percentile of the KL against the float32 original, in units of the floor's own.
MEDIAN, P99 = 1.25, 1.5
#: Rerouted positions, in units of the floor's own.
REROUTED = 1.5
#: How much lower top-1 agreement with the float32 original may be than the floor's own.
TOP1 = 0.005
#: Positions from which quantiles are taken at their word.
MINIMUM = 4096
_DEVIATIONS = 3.0


@dataclasses.dataclass(frozen=True)
class StageReport:
    """One stage, or the prefill of one: the patched model's distance from the reference, and the floor's.

    ``absorbed_calls`` and ``expanded_calls`` count calls of attention modules in the whole stage. ``failures`` says
    what broke which bound, and is empty where all is well.
    """

    name: str
    positions: int
    absorbed_calls: int
    expanded_calls: int
    patched: Distance
    floor: Distance | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing broke a bound."""
        return not self.failures


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """The outcome of a verification: ``passed``, what was compared, by which rule, and the figures of each stage.

    ``rule`` is "strict", "floor" or "requantized"; ``dtype`` is the model's and ``floor_dtype`` that of the original
    which the floor was measured with. ``routers`` is how many routers were watched, 0 for a model without experts.
    """

    source: str
    absorbed: str | None
    rule: Literal["strict", "floor", "requantized"]
    dtype: str
    floor_dtype: str | None
    qk_form: str
    vo_form: str
    backend: str
    cache: str
    text: str
    random_text: bool
    routers: int
    stages: tuple[StageReport, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it is the same model."""
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    @property
    def failures(self) -> tuple[str, ...]:
        """What broke which bound, of all stages."""
        return tuple(failure for stage in self.stages for failure in stage.failures)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not a finite number is None."""
        report: dict[str, Any] = jsonable(self)
        for stage, entry in zip(self.stages, report["stages"], strict=True):
            entry["passed"] = stage.passed
        return report | {"passed": self.passed, "failures": list(self.failures)}

    @property
    def bound(self) -> str:
        """The rule in words."""
        if self.rule == "strict":
            return f"every logit within {STRICT:.0e} of the original's range at its position"
        floor = f"original in {self.floor_dtype}"
        if self.rule == "requantized":
            floor += " with the same bits on kv_b_proj"
        return (
            f"KL to the float32 original at most {MEDIAN} times (median) and {P99} times (99th percentile) that of the "
            f"{floor}, top-1 agreement at most {TOP1:.1%} lower"
        )

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table for people: its columns, and a row for each stage, with the floor's figures in a row below."""
        columns = ["stage", "positions", "absorbed", "expanded", "max Δ", "of range"]
        columns += ["median KL", "99 % KL", "mean KL", "max KL", "top-1", "rerouted"]
        table = []
        for stage in self.stages:
            counts = [f"{count:,}" for count in (stage.positions, stage.absorbed_calls, stage.expanded_calls)]
            name = stage.name if stage.passed else f"{stage.name} FAILED"
            table.append([name, *counts, *_figures(stage.patched)])
            if stage.floor is not None:
                name = "  same bits, kv_b_proj" if self.rule == "requantized" else "  original"
                table.append([name, "", "", "", *_figures(stage.floor)])
        return columns, table

    def summary(self) -> dict[str, str]:
        """What was compared, by name, for people."""
        weights = self.absorbed or "the model itself"
        return {
            "model": f"{self.source} in {self.dtype}",
            "absorbed weights": f"key side {self.qk_form}, value side {self.vo_form}, from {weights}",
            "backend, cache": f"{self.backend}, {self.cache}",
            "compared on": self.text,
            "rule": self.bound,
            "time": f"{self.seconds:.1f} s",
        }

    @property
    def verdict(self) -> str:
        """One line: the answer."""
        if self.passed:
            if self.rule == "requantized":
                return "passed: requantized, and as close to the original as the same bits on kv_b_proj"
            return "passed: it is the same model"
        broken = [stage.name for stage in self.stages if not stage.passed]
        return f"FAILED in {len(broken)} of {len(self.stages)} stages: {', '.join(broken)}"

    def __str__(self) -> str:
        columns, rows = self.rows()
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [f"{name}: {value}" for name, value in self.summary().items()]
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [columns, *rows]]
        return "\n".join([*lines, *self.failures, *self.notes, self.verdict])


def _figures(distance: Distance) -> list[str]:
    kls = (distance.median_kl, distance.p99_kl, distance.mean_kl, distance.largest_kl)
    numbers = [f"{value:.1e}" for value in (distance.largest_difference, distance.largest_relative, *kls)]
    return [*numbers, f"{distance.top1_agreement:.2%}", f"{distance.rerouted}"]


def judge(
    name: str,
    stage: Stage,
    calls: Calls,
    patched: Divergence,
    floor: Divergence | None,
    whose: str = "the original's own",
) -> StageReport:
    """Hold one part of a stage to its rule: the strict one where there is no ``floor``; ``whose`` says what that is."""
    distance = patched.summary()
    failures = _strict(distance) if floor is None else _floor(patched, floor, whose)
    absorbed, every = sum(calls.absorbed.values()), sum(calls.all.values())
    return StageReport(
        name=name,
        positions=len(patched.kl),
        absorbed_calls=absorbed,
        expanded_calls=every - absorbed,
        patched=distance,
        floor=None if floor is None else floor.summary(),
        failures=tuple(f"{name}: {failure}" for failure in (*failures, *_idle(stage, calls))),
    )


def keeps_strictly(found: Divergence) -> bool:
    """Whether every logit keeps the strict rule."""
    return not list(_strict(found.summary()))


def _strict(found: Distance) -> Iterator[str]:
    if not found.largest_relative <= STRICT:  # so that NaN is caught
        yield (
            f"a logit differs by {found.largest_relative:.2e} of the range, over {STRICT:.0e}, at sequence "
            f"{found.worst_sequence}, token {found.worst_token}; routers picked other experts at {found.rerouted} "
            "positions"
        )


def _floor(patched: Divergence, floor: Divergence, whose: str) -> Iterator[str]:
    """The floor rule, as the module has it."""
    n = len(patched.kl)
    exact = n >= MINIMUM
    for words, share, factor in (("median", 0.5, MEDIAN), ("99th percentile", 0.99, P99)):
        if n * (1 - share) < _DEVIATIONS**2:
            continue
        room = 0.0 if exact else _DEVIATIONS * math.sqrt(share * (1 - share) / n)
        found, bound = quantile(patched.settled_kl, share - room), factor * quantile(floor.settled_kl, share + room)
        if not found <= bound:
            yield (
                f"the {words} of the KL to the float32 original is {found:.2e}, over {bound:.2e}, {factor} times "
                f"{whose}; the largest is at {_place(patched)}"
            )
    yield from _floor_of_counts(patched, floor, whose)


def _floor_of_counts(patched: Divergence, floor: Divergence, whose: str) -> Iterator[str]:
    found, own = patched.summary(), floor.summary()
    most = REROUTED * own.rerouted + _DEVIATIONS * math.sqrt(found.rerouted + REROUTED**2 * own.rerouted)
    if found.rerouted > most:
        yield (
            f"routers picked other experts than the float32 original at {found.rerouted} positions, over {most:.0f}; "
            f"the floor, {whose}, has {own.rerouted}"
        )
    differing = int((patched.agrees ^ floor.agrees).sum())
    room = TOP1 + _DEVIATIONS * math.sqrt(differing) / len(patched.agrees)
    if not found.top1_agreement >= own.top1_agreement - room:
        yield (
            f"top-1 agreement with the float32 original is {found.top1_agreement:.2%}, more than {room:.1%} under "
            f"{whose}, {own.top1_agreement:.2%}"
        )


def _place(divergence: Divergence) -> str:
    sequence, token = divergence.places[int(divergence.kl.argmax())].tolist()
    return f"sequence {sequence}, token {token}"


def _idle(stage: Stage, calls: Calls) -> Iterator[str]:
    """Single tokens always are cheaper in latent space: where none ran there, what was compared is not the patch."""
    if stage.decodes and stage.block == 1 and (not calls.all or calls.idle):
        idle = ", ".join(calls.idle[:3]) or "any module"
        yield f"attention never ran absorbed in {idle}: nothing was shown of the absorbed form"
