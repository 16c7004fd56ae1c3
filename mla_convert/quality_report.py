"""What fewer bits cost, as figures: of a model on held-out text, and of each layer's attention."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quality:
    """Distance from the reference over the counted positions, and perplexity.

    KL is in nats per position. ``changed_experts`` counts the positions at which some router picked other experts;
    ``perplexity`` is of the next token at the counted positions, ``reference_perplexity`` the reference's.
    """

    positions: int
    mean_kl: float
    median_kl: float
    p99_kl: float
    largest_kl: float
    top1_agreement: float
    changed_experts: int
    perplexity: float
    reference_perplexity: float

    def row(self, name: str) -> list[str]:
        """Cells for people."""
        kl = [f"{value:.2e}" for value in (self.mean_kl, self.median_kl, self.p99_kl)]
        return [name, *kl, f"{self.changed_experts}", f"{self.perplexity:.4f}"]


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """One layer's attention output on the original's own hidden states: the norm of its change over its norm."""

    layer: int
    relative_change: float


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """A requantized model beside its original, and beside the original with the same bits spent on ``kv_b_proj``."""

    text: str
    windows: int
    absorbed: Quality
    unabsorbed: Quality
    layers: tuple[LayerChange, ...]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of a table."""
        columns = ["", "mean KL", "median", "99th percentile", "changed experts", "perplexity"]
        original = ["original", "", "", "", "", f"{self.absorbed.reference_perplexity:.4f}"]
        coded = [self.absorbed.row("absorbed weights"), self.unabsorbed.row("same bits on kv_b_proj")]
        return columns, [original, *coded]

    def layer_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of a table of the layers."""
        rows = [[f"layer {change.layer}", f"{change.relative_change:.2e}"] for change in self.layers]
        return ["attention output", "relative change"], rows
