"""How far a model is from itself with fewer bits: KL and perplexity on held-out text, one token per step.

Text is cut into windows of :data:`WINDOW` tokens. In each, :data:`PREFILL` tokens are given at once and the rest one by
one, so that every compared position was decoded from codes; only those are compared. The last window ends with the
text, and what the window before it has seen is not counted again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.divergence import compare, quantile
from mla_convert.errors import UsageError
from mla_convert.patches.recognition import attention_modules
from mla_convert.patches.weights import module_geometry
from mla_convert.prompts import Prompts
from mla_convert.quantization import quantize
from mla_convert.schemes import Scheme
from mla_convert.stages import Outputs, Stage, run

WINDOW = 256
PREFILL = 64
#: Windows run side by side.
BATCH = 32


@dataclasses.dataclass(frozen=True)
class Windows:
    """Held-out text: ``ids`` int64 [windows, WINDOW]; ``counted`` bool of the same shape, the compared positions."""

    ids: Tensor
    counted: Tensor

    def batches(self) -> Iterator[slice]:
        """Windows to run side by side."""
        return (slice(start, start + BATCH) for start in range(0, len(self.ids), BATCH))


def cut_windows(text: Prompts, most: int | None = None) -> Windows:
    """All of ``text``, or the first ``most`` windows of it; UsageError where it is shorter than one window."""
    total = len(text.stream)
    if total < WINDOW:
        raise UsageError(f"the text has {total} tokens; at least one window of {WINDOW} is needed")
    starts = list(range(0, total - WINDOW + 1, WINDOW))
    counted = [PREFILL] * len(starts)
    if starts[-1] + WINDOW < total:
        counted.append(max(PREFILL, starts[-1] + 2 * WINDOW - total))
        starts.append(total - WINDOW)
    starts, counted = starts[:most], counted[:most]
    ids = torch.stack([text.stream[start : start + WINDOW] for start in starts])
    return Windows(ids, torch.arange(WINDOW) >= torch.tensor(counted)[:, None])


def read(model: Any, windows: Windows, tick: Callable[[], None] = lambda: None) -> list[Outputs]:
    """What ``model`` makes of the windows, by batches."""
    return [run(model, Stage("held-out", windows.ids[rows], PREFILL), tick=tick) for rows in windows.batches()]


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


def measure(reference: Sequence[Outputs], tested: Sequence[Outputs], windows: Windows) -> Quality:
    """Compare what :func:`read` gave for two models on the same windows."""
    found = [
        compare(ours.logits, theirs.logits, windows.counted[rows], theirs.rerouted(ours))
        for ours, theirs, rows in zip(reference, tested, windows.batches(), strict=True)
    ]
    kl = torch.cat([part.kl for part in found])
    return Quality(
        positions=len(kl),
        mean_kl=float(kl.mean()),
        median_kl=quantile(kl, 0.5),
        p99_kl=quantile(kl, 0.99),
        largest_kl=float(kl.max()),
        top1_agreement=float(torch.cat([part.agrees for part in found]).double().mean()),
        changed_experts=int(sum(int(part.rerouted.sum()) for part in found)),
        perplexity=perplexity(tested, windows),
        reference_perplexity=perplexity(reference, windows),
    )


def perplexity(outputs: Sequence[Outputs], windows: Windows) -> float:
    """exp of the mean surprise, in nats, at the next token of each counted position that has one in its window."""
    total, count = 0.0, 0
    for part, rows in zip(outputs, windows.batches(), strict=True):
        counted = windows.counted[rows, :-1]
        logits = part.logits[:, :-1][counted].double()
        total += float(nn.functional.cross_entropy(logits, windows.ids[rows, 1:][counted], reduction="sum"))
        count += int(counted.sum())
    return math.exp(total / count)


@contextlib.contextmanager
def coded_projections(model: nn.Module, qk: Scheme | None, vo: Scheme | None) -> Iterator[None]:
    """``kv_b_proj`` of every layer as the same codes would make it, unabsorbed, for the length of a ``with`` block.

    Where both schemes are one, the whole matrix is coded as it is stored; else the rows of each side by themselves.
    """
    weights = [(module_geometry(module), _kv_b(module)) for _, module in attention_modules(model)]
    kept = [weight.clone() for _, weight in weights]
    try:
        for geometry, weight in weights:
            weight.copy_(code_rows(weight.float(), geometry.num_heads, geometry.qk_nope_head_dim, qk, vo))
        yield
    finally:
        for (_, weight), before in zip(weights, kept, strict=True):
            weight.copy_(before)


def _kv_b(module: Any) -> Tensor:
    weight: Tensor = module.kv_b_proj.weight.detach()
    return weight


def code_rows(kv_b: Tensor, heads: int, n: int, qk: Scheme | None, vo: Scheme | None) -> Tensor:
    """``kv_b_proj.weight`` [H·(N + V), C] float32 coded and decoded: key rows by ``qk``, value rows by ``vo``."""
    if qk is not None and qk == vo:
        return quantize(kv_b, qk).dequantize()
    rows = kv_b.view(heads, -1, kv_b.shape[1])
    sides = []
    for part, scheme in ((rows[:, :n], qk), (rows[:, n:], vo)):
        flat = part.reshape(-1, kv_b.shape[1])
        sides.append((flat if scheme is None else quantize(flat, scheme).dequantize()).view(part.shape))
    return torch.cat(sides, dim=1).reshape(kv_b.shape)
