"""How far a model is from itself with fewer bits: KL and perplexity on held-out text, one token per step.

Text is cut into windows of :data:`WINDOW` tokens. In each, :data:`PREFILL` tokens are given at once and the rest one by
one, so that every compared position was decoded from codes; only those are compared. The last window ends with the
text, and what the window before it has seen is not counted again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.divergence import compare, quantile
from mla_convert.errors import UsageError
from mla_convert.patches.apply import patched
from mla_convert.patches.loading import load_original
from mla_convert.patches.modules import module_geometry
from mla_convert.patches.recognition import attention_modules
from mla_convert.prompts import Prompts, read_prompts
from mla_convert.quality_report import LayerChange, Quality, QualityReport
from mla_convert.quantization import quantize
from mla_convert.quiet import no_loading_bars
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
        raise UsageError(f"{text.origin} has {total} tokens, and one window has {WINDOW}: give a longer text")
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
    weight = getattr(module.kv_b_proj, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES:
        raise UsageError(
            "kv_b_proj holds no plain weight that could be coded for comparison: take the model's folder, which is "
            "loaded in plain numbers"
        )
    return weight.detach()


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


#: Windows that :func:`report_quality` reads; a text that has more is not read on.
MOST = 32


def held_out_windows(
    source: str | os.PathLike[str], vocabulary: int, text: str | os.PathLike[str] | None = None
) -> tuple[Prompts, Windows]:
    """What :func:`report_quality` reads: the text of ``source``, or random tokens below ``vocabulary``, in windows."""
    prompts = read_prompts(source, vocabulary, text)
    return prompts, cut_windows(prompts, MOST)


def report_quality(
    source: str | os.PathLike[str],
    absorbed: str | os.PathLike[str],
    schemes: tuple[Scheme | None, Scheme | None],
    text: str | os.PathLike[str] | None = None,
) -> QualityReport:
    """Run the model of ``source`` over held-out text, in float32: as it is, with the quantized weights in ``absorbed``,
    and unpatched with ``kv_b_proj`` coded by the same ``schemes`` (key side, value side).

    ``text`` is a file; by default the source's ``held_out.txt`` or the text that ships with this package. Without a
    tokenizer random tokens stand in, and there is no perplexity.
    """
    with no_loading_bars():
        model = load_original(source, dtype=torch.float32)
    embeddings: Any = model.get_input_embeddings()
    prompts, windows = held_out_windows(source, int(embeddings.weight.shape[0]), text)
    reference = read(model, windows)
    with patched(model, absorbed):
        coded = measure(reference, read(model, windows), windows)
    with coded_projections(model, *schemes):
        unabsorbed = measure(reference, read(model, windows), windows)
    layers = tuple(change_of_attention(model, absorbed, windows.ids[:4]))
    if prompts.random:  # what no model could have guessed says nothing of how well it guesses
        coded, unabsorbed = (
            dataclasses.replace(found, perplexity=None, reference_perplexity=None) for found in (coded, unabsorbed)
        )
    return QualityReport(prompts.origin, len(windows.ids), coded, unabsorbed, layers, random=prompts.random)


@torch.no_grad()
def change_of_attention(model: Any, absorbed: str | os.PathLike[str], ids: Tensor) -> Iterator[LayerChange]:
    """How each layer's attention output changes on the hidden states that the original has there, ids [n, S].

    The whole text is read absorbed, in one call, so that every position is computed with the stored weights.
    """
    modules = attention_modules(model)
    seen: dict[str, tuple[dict[str, Any], Tensor]] = {}

    def note(name: str, kwargs: dict[str, Any], output: Any) -> None:
        seen[name] = (kwargs, output[0])

    hooks = [
        module.register_forward_hook(
            lambda _m, _a, kwargs, output, name=name: note(name, kwargs, output), with_kwargs=True
        )
        for name, module in modules
    ]
    try:
        model(ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    with patched(model, absorbed, prefill_threshold=ids.shape[1]):
        for name, module in modules:
            kwargs, before = seen[name]
            after = module(**kwargs)[0]
            yield LayerChange(int(module.layer_idx), float((after - before).norm() / before.norm()))  # type: ignore
