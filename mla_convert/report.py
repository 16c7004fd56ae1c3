"""Measured times as results: figures with their spread, a table, JSON and a plot."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from mla_convert.errors import UsageError
from mla_convert.machine import Machine
from mla_convert.patches.description import PatchDescription
from mla_convert.paths import new_file
from mla_convert.wording import option

#: Quartiles further apart than this share of the median are called out: the machine had other work.
CALM = 0.25
PLOTS = (".pdf", ".png", ".svg")


@dataclasses.dataclass(frozen=True)
class Spread:
    """One measured figure: median, lower and upper quartile, and every repetition in order."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of two values or more; quartiles interpolated."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, tuple(values))

    @property
    def width(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.median


@dataclasses.dataclass(frozen=True)
class ContextTiming:
    """Both sides at one context.

    ``context`` counts the tokens that the new one sees, itself included (T). ``original`` and ``patched`` are seconds
    per step. ``ratio`` is how many times faster the patched one is, from pairs of neighbouring steps, so that a machine
    that slows down in between does not bend it. ``logit_difference`` is the largest difference of the two models'
    logits in this step over the original's range.
    """

    context: int
    original: Spread
    patched: Spread
    ratio: Spread
    logit_difference: float


@dataclasses.dataclass(frozen=True)
class BenchmarkReport:
    """A decode step of the whole model, original and patched; ``str()`` of it is a table, ``to_dict()`` for JSON."""

    model: str
    dtype: str
    batch: int
    repetitions: int
    contexts: tuple[ContextTiming, ...]
    patch: PatchDescription
    machine: Machine

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times are seconds."""
        return dataclasses.asdict(self) | {"notes": self.notes}

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        return f"One decode step of {self.model}, {self.dtype}, batch {self.batch}: median (quartiles)"

    @property
    def setting(self) -> str:
        """Where and how, in a line."""
        m = self.machine
        threads = "1 thread" if m.threads == 1 else f"{m.threads} threads"
        return (
            f"{self.repetitions} repetitions in turns, {threads}, {m.device}, torch {m.torch}, "
            f"transformers {m.transformers} ({self.patch.original_attention}), backend {self.patch.backend}"
        )

    @property
    def notes(self) -> list[str]:
        """What to know before quoting the figures."""
        widths = {row.context: max(row.original.width, row.patched.width) for row in self.contexts}
        restless = [f"{context:,}" for context, width in widths.items() if width > CALM]
        if not restless:
            return []
        return [
            f"the quartiles at {' and '.join(restless)} lie up to {max(widths.values()):.0%} of the median apart: "
            "other work disturbed this run; repeat it on an idle machine before quoting it"
        ]

    @property
    def columns(self) -> list[str]:
        """The table's heads."""
        return ["context", "original, ms", "patched, ms", "ratio", "logits differ by"]

    def rows(self) -> list[list[str]]:
        """The table's cells, a row per context."""
        return [
            [
                f"{row.context:,}",
                _cell(row.original, 1e3),
                _cell(row.patched, 1e3),
                _cell(row.ratio, 1),
                f"{row.logit_difference:.1e}",
            ]
            for row in self.contexts
        ]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *table, self.setting, *self.notes])


def _cell(figure: Spread, unit: float) -> str:
    """Median and quartiles with three significant digits or all whole ones."""
    median, low, high = (unit * value for value in (figure.median, figure.low, figure.high))
    digits = 0 if median >= 100 else 1 if median >= 10 else 2
    return f"{median:,.{digits}f} ({low:,.{digits}f} … {high:,.{digits}f})"


def check_plot(target: str | os.PathLike[str]) -> pathlib.Path:
    """Where a plot will go; UsageError, before any long work, where it could not be written."""
    path = new_file(target, option("plot"))
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option('plot')} needs matplotlib, which is not installed: pip install matplotlib")
    if path.suffix not in PLOTS:
        raise UsageError(
            f"{option('plot')} {path}: the name's ending decides the format; supported are {', '.join(PLOTS)}"
        )
    return path


def save_plot(report: BenchmarkReport, target: str | os.PathLike[str]) -> None:
    """Draw milliseconds per step over context, both axes logarithmic, quartiles as bars, and write a new file.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be made.
    """
    path = check_plot(target)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    contexts = [row.context for row in report.contexts]
    for name in ("original", "patched"):
        sides: list[Spread] = [getattr(row, name) for row in report.contexts]
        bars = [[1e3 * (s.median - s.low) for s in sides], [1e3 * (s.high - s.median) for s in sides]]
        axes.errorbar(contexts, [1e3 * s.median for s in sides], yerr=bars, marker="o", capsize=3, label=name)
    for row in report.contexts:
        where = (row.context, 1e3 * row.original.median)
        axes.annotate(f"{row.ratio.median:.1f}×", where, textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="decode step, ms", title=report.title)
    axes.title.set_fontsize("small")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.legend()
    with open(path, "xb") as file:
        figure.savefig(file, format=path.suffix[1:])
