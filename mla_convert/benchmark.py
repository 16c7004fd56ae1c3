"""What a decode step costs here: the original and the patched model beside each other, in one run.

**Two models, one set of weights.** The original and the patched model are copies of the modules alone; parameters and
buffers are the same tensors in both and in the model that was given, which stays as it is. So a large model costs no
second set of weights, only its absorbed ones and a second cache. Patching and unpatching one model in turns would make
the absorbed weights anew each time, and leave the steps after it with other contents of the processor's caches.

**Equal histories.** Nothing is prefilled: both caches are given the same random latents, normalised by the layer's own
``kv_a_layernorm``, and the same random rotary keys, each in the kind of cache that ``generate()`` would use
(``DynamicCache`` and ``LatentCache``). What a step costs does not depend on the values, and a long context is free.

**In turns.** original, patched, original, …: whatever else the machine does meets both. A step is one new token for
each sequence through the whole model, cache append included; the token is removed again outside the timed part. One
step of each that is not timed comes first, and tells how far apart the two models' logits are.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from mla_convert.errors import UsageError
from mla_convert.formats import plain
from mla_convert.kernels.dispatch import choose_backend
from mla_convert.machine import describe_machine, synchronize
from mla_convert.patches.apply import patch
from mla_convert.patches.cache import LatentCache
from mla_convert.patches.loading import load_original
from mla_convert.patches.modules import module_geometry, weight_dtype
from mla_convert.patches.recognition import attention_modules
from mla_convert.quiet import no_loading_bars
from mla_convert.recipe import parse_device, parse_dtype, parse_forms
from mla_convert.report import BenchmarkReport, ContextTiming, Spread
from mla_convert.sizes import check_counts, choose_contexts
from mla_convert.storage import own_sidecar
from mla_convert.trial import refuse_nonfinite_logits, try_out
from mla_convert.wording import option

_SEED = 0


def bench(
    model_or_source: PreTrainedModel | str | os.PathLike[str],
    absorbed: str | os.PathLike[str] | None = None,
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    contexts: Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
    codes: str = "auto",
    repetitions: int = 20,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> BenchmarkReport:
    """Time a decode step of a model as it is and as patched; how it is done stands at the top of this module.

    Args:
        model_or_source: a transformers model that is not patched, which is left as it is; or a checkpoint folder.
        absorbed: a folder that ``convert`` wrote; None takes the ``mla_absorbed`` inside a checkpoint folder if there
            is one and no form is asked for, and else derives the absorbed weights from the model.
        form, qk, vo, backend, codes: as for ``patch``.
        contexts: tokens that the new one sees, itself included; by default those of 64, 1,024 and 4,096 that the model
            has positions for.
        dtype, device: for a checkpoint folder: what it is loaded in (the config's own dtype) and where it runs (cpu).
        repetitions: timed steps of each model and context, from 3.
        batch: sequences decoded at once.
        progress: called with the steps done and their number.

    Raises:
        UsageError: arguments that don't fit together, a context beyond the model's ``max_position_embeddings``.
        CheckpointError: the original does not run, or gives NaN or infinite logits.
        Whatever ``patch`` and loading raise.
    """
    check_counts(repetitions, batch)
    asked = parse_forms(form, qk, vo)
    model, name = _take(model_or_source, dtype, device)
    if absorbed is None and not isinstance(model_or_source, PreTrainedModel) and set(asked.values()) == {"auto"}:
        absorbed = own_sidecar(model_or_source)
    lengths = choose_contexts(contexts, model)
    choose_backend(backend, model.device)
    try_out(model, name)  # before the twins are made: some codes move to other places in their first run
    patched = twin(model)
    description = patch(patched, absorbed, form=form, qk=qk, vo=vo, backend=backend, codes=codes).describe()
    run = _Run(twin(model), patched, name, repetitions, batch, len(lengths), progress)
    rows = tuple(run.measure(length) for length in lengths)
    return BenchmarkReport(
        model=f"{name} ({description.family}, {len(description.layers)} layers)",
        dtype=plain(model.dtype),
        batch=batch,
        repetitions=repetitions,
        contexts=rows,
        patch=description,
        machine=describe_machine(model.device),
    )


def _take(
    given: PreTrainedModel | str | os.PathLike[str], dtype: str | torch.dtype | None, device: str | torch.device | None
) -> tuple[PreTrainedModel, str]:
    """The model, and what it is called."""
    if isinstance(given, PreTrainedModel):
        if dtype is not None or device is not None:
            raise UsageError(
                f"{option('dtype')} and {option('device')} are for a checkpoint folder; give the model as it is to run"
            )
        return given, type(given).__name__
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"bench takes a transformers model or a checkpoint folder, found {type(given).__name__}")
    return _load(given, dtype, device), os.fspath(given)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same tensors, in evaluation mode: modules and config are copies, the weights are not."""
    shared = [*model.parameters(), *model.buffers()]
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    other.train(False)
    return other


class _Side:
    """One model with its history, and the step that is timed."""

    def __init__(self, model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def step(self) -> tuple[float, torch.Tensor]:
        """Seconds of one step, and its logits [B, 1, vocabulary]; the history is as before afterwards."""
        given: dict[str, Any] = {"input_ids": self.ids, "use_cache": True, self.keyword: self.cache}
        synchronize(self.ids.device)
        begun = perf_counter()
        logits = self.model(**given).logits
        synchronize(self.ids.device)
        seconds = perf_counter() - begun
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.crop(-1)
        return seconds, logits


class _Run:
    """Both models, and how often and how wide they are run."""

    def __init__(
        self,
        original: PreTrainedModel,
        patched: PreTrainedModel,
        name: str,
        repetitions: int,
        batch: int,
        contexts: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.original, self.patched, self.name = original, patched, name
        self.repetitions, self.batch = repetitions, batch
        self.progress, self.done, self.total = progress, 0, contexts * (repetitions + 1)

    @torch.inference_mode()
    def measure(self, context: int) -> ContextTiming:
        """Time both models over ``context`` − 1 cached tokens and a new one."""
        original, patched = self._sides(context)
        (_, wanted), (_, found) = original.step(), patched.step()
        refuse_nonfinite_logits(wanted, self.original, self.name)
        self._tick()
        pairs = []
        for _ in range(self.repetitions):
            pairs.append((original.step()[0], patched.step()[0]))
            self._tick()
        return ContextTiming(
            context=context,
            original=Spread.of([a for a, _ in pairs]),
            patched=Spread.of([b for _, b in pairs]),
            ratio=Spread.of([a / b for a, b in pairs]),
            logit_difference=_relative(wanted, found),
        )

    def _sides(self, context: int) -> tuple[_Side, _Side]:
        model = self.original
        generator = torch.Generator(model.device).manual_seed(_SEED)
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (self.batch, 1), generator=generator, device=model.device)
        caches = DynamicCache(config=model.config), LatentCache(model.config)
        fill(caches, model, self.batch, context - 1)
        if any(getattr(layer, "is_sliding", False) for layer in caches[0].layers):
            raise UsageError("this model's config asks for caches of a sliding window, which cannot give a step back")
        return _Side(self.original, caches[0], ids), _Side(self.patched, caches[1], ids)

    def _tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def fill(caches: Sequence[Cache], model: PreTrainedModel, batch: int, tokens: int) -> None:
    """Append the same ``tokens`` random latents [B, 1, tokens, C] and rotary keys [B, 1, tokens, R] to all caches."""
    for _, module in attention_modules(model):
        attention: Any = module
        # kv_b_proj may hold codes, or none of its numbers yet
        g, dtype, device = module_geometry(attention), weight_dtype(attention), attention.kv_a_layernorm.weight.device
        generator = torch.Generator(device).manual_seed(_SEED + attention.layer_idx)
        latent, k_rope = (
            torch.randn(batch, 1, tokens, width, generator=generator, device=device, dtype=dtype)
            for width in (g.kv_lora_rank, g.qk_rope_head_dim)
        )
        latent = attention.kv_a_layernorm(latent)
        for cache in caches:
            cache.update(latent, k_rope, attention.layer_idx)


def _relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Largest difference over the range of ``wanted``."""
    a, b = wanted.double(), found.double()
    return float((a - b).abs().max() / (a.max() - a.min()))


def _load(source: str | os.PathLike[str], dtype: Any, device: Any) -> PreTrainedModel:
    where = parse_device(device or "cpu")
    with no_loading_bars():
        model = load_original(source, dtype=None if dtype is None else parse_dtype(dtype))
    return model if where.type == "cpu" else model.to(where)  # type: ignore[arg-type]
