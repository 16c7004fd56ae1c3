"""Is it still the same model? Original and patched, side by side, at every position.

Three rules, of which one applies:

- **strict**: a float32 model whose absorbed weights were not rounded. The largest difference of any logit at any
  position is at most :data:`STRICT` of the original's range of logits at that position.
- **floor**: a lower precision, be it the model's or that of absorbed weights that were rounded. The original itself, at
  that precision, has a distance from the float32 original: the floor. The patched model may be little farther away
  (:mod:`mla_convert.judgement`). A float32 model in memory that holds codes has its floor, too, since some round what
  they multiply: the model as it runs, against the numbers that the codes mean. Where that keeps the strict rule, so
  must the patched model.
- **requantized**: absorbed weights that are codes. They are not the same numbers and cannot be the same model; the
  question is whether they are as good as their bits. The floor is the original with the same codes spent on
  ``kv_b_proj`` as it was (in the lowest precision of the others), and the patched model is held to it by the same
  figures as under the floor rule.

Either way attention has to have run in latent space, in every layer: a verification of what never ran proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.divergence import Divergence, compare
from mla_convert.formats import plain
from mla_convert.judgement import StageReport, VerificationReport, judge, keeps_strictly
from mla_convert.patches.apply import patched
from mla_convert.patches.description import PatchDescription
from mla_convert.prompts import Prompts, read_prompts
from mla_convert.quality import coded_projections
from mla_convert.sizes import BLOCK, check_positions, check_sizes, choose_sizes
from mla_convert.stages import Outputs, Stage, counted_calls, run
from mla_convert.subject import Subject
from mla_convert.trial import evaluating, refuse_nonfinite_logits, try_out


def verify(
    model_or_source: PreTrainedModel | str | os.PathLike[str],
    absorbed: str | os.PathLike[str] | None = None,
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    dtype: str | torch.dtype | None = None,
    prompts: str | os.PathLike[str] | None = None,
    prefill: int = 64,
    decode: int | None = None,
    batch: int | None = None,
    backend: str = "auto",
    cache: str = "latent",
    codes: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> VerificationReport:
    """Compare a model with itself patched: prefill, decode one token and three at a time, left padding, one sequence.

    Args:
        model_or_source: a transformers model that is not patched (it is while this runs, and is given back as it was),
            or a checkpoint folder of any layout.
        absorbed: a folder that ``convert`` wrote. None derives the absorbed weights from the model, unless the source
            folder holds an ``mla_absorbed``, which ``mla_convert.load`` would use, too.
        form, qk, vo, backend, cache, codes: as for ``patch``.
        dtype: of a model loaded from a folder: float32 by default, bfloat16, float16, or source (the config's).
        prompts: a text file; by default the source's ``held_out.txt`` or a text that ships with this package. Without
            a tokenizer in the source, random tokens are used, and the report says so.
        prefill: tokens given at once before decoding.
        decode: tokens decoded after them, per sequence. By default 48, or 64 under the floor rule.
        batch: sequences side by side. By default 4, or as many as the floor rule's 4,096 positions need.
            Logits of batch × (prefill + decode) positions are held in float32, several times.
        progress: called with the calls done and their number.

    Returns:
        A report; ``passed`` is the answer, ``str()`` is for people, ``to_dict()`` for programs.

    Raises:
        MismatchError: the absorbed weights were made from another model or checkpoint.
        UsageError: arguments that are not known or do not fit together.
        MLAConvertError: whatever loading and patching raise.
    """
    started = time.perf_counter()
    check_sizes(prefill, decode, batch)
    patching = {"form": form, "qk": qk, "vo": vo, "backend": backend, "cache": cache, "codes": codes}
    subject = Subject(model_or_source, absorbed, dtype)
    try_out(subject.model, subject.label)
    with patched(subject.model, subject.absorbed, **patching):
        pass  # whatever cannot be patched is refused before the long part
    floor = subject.floor_dtype()
    sizes = choose_sizes(prefill, decode, batch, floored=floor is not None)
    check_positions(subject.model, *sizes[:2])
    text = read_prompts(subject.folder, subject.vocabulary, prompts)
    reports, description, routers = _compare_all(subject, floor, _stages(text, sizes), patching, progress)
    return _report(subject, floor, text, reports, description, routers, time.perf_counter() - started)


def _report(
    subject: Subject,
    floor: torch.dtype | None,
    text: Prompts,
    reports: Sequence[StageReport],
    description: PatchDescription,
    routers: int,
    seconds: float,
) -> VerificationReport:
    if all(stage.floor is None for stage in reports):
        floor = None
    return VerificationReport(
        source=subject.label,
        absorbed=None if subject.absorbed is None else os.fspath(subject.absorbed),
        rule="requantized" if subject.schemes is not None else "strict" if floor is None else "floor",
        dtype=plain(subject.dtype),
        floor_dtype=None if floor is None else plain(floor),
        qk_form=description.qk_form,
        vo_form=description.vo_form,
        backend=description.backend,
        cache=description.cache,
        text=text.description,
        random_text=text.random,
        routers=routers,
        stages=tuple(reports),
        notes=tuple(subject.notes(reports)),
        seconds=seconds,
    )


def _compare_all(
    subject: Subject,
    floor: torch.dtype | None,
    stages: list[Stage],
    patching: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[StageReport], PatchDescription, int]:
    """Reference first, then the floor, then the patched model: at most two models are in memory."""
    # One call over all tokens gives the float32 original's logits for less; where the strict rule may apply both take
    # the same steps, so that nothing but the patch is between them.
    exact = floor is None or (floor == torch.float32 and subject.schemes is None)
    ticks = _Ticks(progress, stages, floored=floor is not None, whole=not exact)
    with evaluating(subject.reference()) as original:
        references = [run(original, stage, whole=not exact, tick=ticks) for stage in stages]
        for reference in references:
            refuse_nonfinite_logits(reference.logits, original, subject.label)
    del original
    own: list[dict[str, Divergence]] = [{} for _ in stages]
    if floor is not None:
        with evaluating(subject.at(floor)) as lower, _as_coded(lower, subject):
            own = [_found(stage, r, run(lower, stage, tick=ticks)) for stage, r in zip(stages, references, strict=True)]
        del lower
    if exact and all(keeps_strictly(divergence) for parts in own for divergence in parts.values()):
        own = [{} for _ in stages]  # float32 codes that multiply as plain numbers do
    reports = []
    with evaluating(subject.model) as model, patched(model, subject.absorbed, **patching) as handle:
        description = handle.describe()
        for stage, reference, floors in zip(stages, references, own, strict=True):
            with counted_calls(model) as calls:
                found = _found(stage, reference, run(model, stage, tick=ticks))
            reports += [
                judge(name, stage, calls, there, floors.get(name), subject.whose) for name, there in found.items()
            ]
    return reports, description, len(references[0].routes)


def _as_coded(model: PreTrainedModel, subject: Subject) -> contextlib.AbstractContextManager[None]:
    """``model`` with the subject's codes spent on ``kv_b_proj``, for a ``with`` block; as it is if there are none."""
    return contextlib.nullcontext() if subject.schemes is None else coded_projections(model, *subject.schemes)


def _found(stage: Stage, reference: Outputs, outputs: Outputs) -> dict[str, Divergence]:
    """For each part of a stage, the divergence at its real positions."""
    rerouted = outputs.rerouted(reference)
    found = {}
    for name, (start, stop) in stage.parts().items():
        chosen = stage.real.clone()
        chosen[:, :start] = False
        chosen[:, stop:] = False
        found[name] = compare(reference.logits, outputs.logits, chosen, rerouted)
    return found


class _Ticks:
    """Counts the calls of all models in all stages for a progress bar."""

    def __init__(
        self, progress: Callable[[int, int], None] | None, stages: list[Stage], *, floored: bool, whole: bool
    ) -> None:
        self.progress = progress
        self.done = 0
        steps = sum(len(stage.cuts()) for stage in stages)
        self.total = (len(stages) if whole else steps) + (steps if floored else 0) + steps

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def _stages(text: Prompts, sizes: tuple[int, int, int]) -> list[Stage]:
    prefill, decode, batch = sizes
    total = prefill + decode
    # Twice the sequences and half the steps: as many positions, and more lengths of padding.
    padded = text.take(2 * batch, prefill + -(-decode // 2))
    padding = torch.arange(2 * batch) * (prefill - 1) // (2 * batch - 1)
    return [
        Stage("prefill", text.take(batch, total), total),
        Stage("decode", text.take(batch, total), prefill),
        Stage(f"decode by {BLOCK}", text.take(batch, total), prefill, BLOCK),
        Stage("padded", padded, prefill, padding=padding.flip(0)),
        Stage("one sequence", text.take(1, total // 2), min(prefill, total // 4)),
    ]
