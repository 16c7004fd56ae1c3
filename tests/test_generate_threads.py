"""Several threads at once: two models, one model, and a compilation beside a decode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from generation import Outcome, check_same, generated
from patching import BOUND, steps
from transformers import DynamicCache, PreTrainedModel

import mla_convert


def at_once(jobs: list[Callable[[], Outcome]]) -> list[Outcome]:
    """Results of all jobs, each in a thread of its own, started together."""
    results: list[Any] = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        gate.wait()
        results[i] = jobs[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("form", ["factored", "fused"])
@pytest.mark.parametrize("seeds", [(0, 5), (0, 0)], ids=["two-models", "one-model"])
def test_threads_generate_at_once(seeds: tuple[int, int], form: str) -> None:
    """Each with its own prompt length, so that prefill of one meets decoding of the other."""
    made = {seed: models.deepseek_v3(seed=seed) for seed in seeds}
    prompts = [(made[seed], models.tokens(1, 8 + 9 * i, seed=i)) for i, seed in enumerate(seeds)]
    expected = [generated(model, ids) for model, ids in prompts]
    for model in made.values():
        mla_convert.patch(model, form=form)
    jobs: list[Callable[[], Outcome]] = [lambda m=m, ids=ids: generated(m, ids) for m, ids in prompts]  # type: ignore[misc]
    for found, wanted in zip(at_once(jobs), expected, strict=True):
        check_same(found, wanted)


def while_another_thread_compiles(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ends_in: str) -> None:
    """Act as if a compilation began before each attention call and ended inside it."""

    def flag(compiling: bool) -> Callable[..., None]:
        return lambda *_: monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiling)

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(flag(True))
        layer.self_attn.get_submodule(ends_in).register_forward_hook(flag(False))


@pytest.mark.parametrize("ends_in", ["q_a_layernorm", "kv_a_layernorm"])
@torch.inference_mode()
def test_a_compilation_in_another_thread_changes_nothing(
    ends_in: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """While any thread compiles, ``torch.compiler.is_compiling()`` is true in all of them."""
    model, ids = models.deepseek_v3(), models.tokens(1, 12)
    expected = model(ids).logits
    with mla_convert.patched(model, form="fused"):
        while_another_thread_compiles(model, monkeypatch, ends_in)
        found = steps(model, ids, DynamicCache(), [6, 1, 1, 2, 1, 1])
    assert models.relative(found, expected) <= BOUND and runs == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1]
