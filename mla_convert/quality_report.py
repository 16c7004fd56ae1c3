"""What fewer bits cost, as figures: of a model on held-out text, and of each layer's attention."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quality:
    """Distance from the reference over the counted positions, and perplexity.

    KL is in nats per position. ``changed_experts`` counts the positions at which some router picked other experts;
    ``perplexity`` is of the next token at the counted positions, ``reference_perplexity`` the reference's; None where
    the tokens are random.
    """

    positions: int
    mean_kl: float
    median_kl: float
    p99_kl: float
    largest_kl: float
    top1_agreement: float
    changed_experts: int
    perplexity: float | None
    reference_perplexity: float | None

    def row(self, name: str) -> list[str]:
        """Cells for people."""
        kl = [f"{value:.2e}" for value in (self.mean_kl, self.median_kl, self.p99_kl)]
        return [name, *kl, f"{self.changed_experts}", _number(self.perplexity)]


def _number(perplexity: float | None) -> str:
    return "" if perplexity is None else f"{perplexity:.4f}"


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """One layer's attention output on the original's own hidden states: the norm of its change over its norm."""

    layer: int
    relative_change: float


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """A requantized model beside its original, and beside the original with the same bits spent on ``kv_b_proj``.

    ``text`` says what was read, in ``windows`` windows, and ``random`` whether that was no text, but random tokens.
    """

    text: str
    windows: int
    absorbed: Quality
    unabsorbed: Quality
    layers: tuple[LayerChange, ...]
    random: bool = False

    @property
    def title(self) -> str:
        """What the figures are of, in a line."""
        positions = f"{self.absorbed.positions:,} decoded positions in {self.windows} windows"
        return f"On {self.text}: {positions}" if self.random else f"On held-out {self.text}: {positions}"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of a table; random tokens have no perplexity."""
        columns = ["", "mean KL", "median", "99th percentile", "changed experts", "perplexity"]
        original = ["original", "", "", "", "", _number(self.absorbed.reference_perplexity)]
        rows = [original, self.absorbed.row("absorbed weights"), self.unabsorbed.row("same bits on kv_b_proj")]
        return (columns[:-1], [row[:-1] for row in rows[1:]]) if self.random else (columns, rows)

    def layer_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of a table of the layers."""
        rows = [[f"layer {change.layer}", f"{change.relative_change:.2e}"] for change in self.layers]
        return ["attention output", "relative change"], rows
