"""Every cache that transformers offers, through ``generate()`` and by hand, against the unpatched model."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import models
import older
import pytest
import torch
from generation import Outcome, Subject, check_patched, check_same, generated, small, trained
from patching import BOUND, steps
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

import mla_convert
from mla_convert.patches import cache as cache_module
from mla_convert.patches.latent_layer import LatentLayer
from mla_convert.patches.layer import layer_of


@pytest.fixture(params=["small", pytest.param("trained", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest, example_path: pathlib.Path) -> Subject:
    return small() if request.param == "small" else trained(example_path)


class GroupedLayer(QuantizedLayer):
    """transformers' quantized layer with 8 bit codes: what quanto and hqq compute, without their packing."""

    def __init__(self) -> None:
        super().__init__(nbits=8, residual_length=4)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return torch.round(tensor / scale).to(torch.int8), scale

    def _dequantize(self, q_tensor: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return q_tensor[0] * q_tensor[1]


def every(kind: Callable[[], Any]) -> Callable[[PreTrainedModel], Cache]:
    return lambda model: Cache(layers=[kind() for _ in range(model.config.num_hidden_layers)])


def _latent(model: PreTrainedModel) -> Cache:
    """A fault of ``LatentCache`` must not reach what it is compared with: the original model gets transformers' own."""
    return (mla_convert.LatentCache if any(map(layer_of, model.modules())) else DynamicCache)(config=model.config)


CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "latent": lambda model: _latent(model),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=60),
    "sliding": every(lambda: DynamicSlidingWindowLayer(sliding_window=9)),
    "static-sliding": every(lambda: StaticSlidingWindowLayer(max_cache_len=60, sliding_window=9)),
    "fp8": every(lambda: cache_utils.Fp8QuantizedLayer()),  # looked up late: older releases have none
    "grouped-codes": every(GroupedLayer),
}
#: Kinds that round what they keep. A number at the edge between two codes falls to one side or the other by the last
#: bit of what went before, and moves logits by more than the bound: in float64 hardly any lies so near an edge.
CODED = ("fp8", "grouped-codes")
FP8 = pytest.param("fp8", marks=older.lacks("an FP8 cache"))
KINDS = [FP8 if kind == "fp8" else kind for kind in CACHES]


@pytest.mark.parametrize("kind", KINDS)
def test_generate_with_every_cache(subject: Subject, kind: str, runs: list[int]) -> None:
    """A cache made by the user and handed to ``generate()``, with a left-padded batch."""
    check_patched(
        subject.model, lambda m: generated(m, subject.padded, attention_mask=subject.mask, cache=CACHES[kind](m))
    )
    assert runs.count(1) >= 9 * subject.model.config.num_hidden_layers


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_several_new_tokens_with_every_cache(kind: str) -> None:
    """Without padding; steps of one and of several tokens, expanded and absorbed."""
    model, ids = models.deepseek_v3(), models.tokens(2, 26)
    if kind in CODED:
        model = model.double()
        model.set_experts_implementation("eager")  # PyTorch's grouped product has no float64
    sizes = [11, 1, 3, 1, 2, 5, 1, 2]
    expected = steps(model, ids, CACHES[kind](model), sizes)
    for patching in ({}, {"prefill_threshold": 0}, {"prefill_threshold": 30, "form": "fused"}):
        with mla_convert.patched(model, **patching):
            found = steps(model, ids, CACHES[kind](model), sizes)
        assert models.relative(found, expected) <= BOUND


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cache_implementation": "static"}, id="static"),
        pytest.param(
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
            id="quantized",
            marks=older.lacks("an FP8 cache"),
        ),
    ],
)
def test_caches_that_generate_makes(options: dict[str, Any]) -> None:
    subject = small()
    check_patched(subject.model, lambda m: generated(m, subject.padded, attention_mask=subject.mask, **options))


@pytest.mark.parametrize(
    ("backend", "package", "config"),
    [
        ("quanto", "optimum.quanto", {"nbits": 4, "q_group_size": 8, "residual_length": 4}),
        ("hqq", "hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1, "q_group_size": 8, "residual_length": 4}),
    ],
    ids=["quanto", "hqq"],
)
def test_quantized_caches_of_other_packages(backend: str, package: str, config: dict[str, Any]) -> None:
    """The real ones, where their packages are there; everywhere else ``GroupedLayer`` stands for what they compute."""
    # Neither is among the packages of the tests: quanto compiles C++ when it is first used, which needs a compiler, and
    # importing hqq raises a deprecation warning of PyTorch's, which is an error here. Where they are, these tests run.
    pytest.importorskip(package, reason=f"transformers' {backend} cache is by {package}, which is not installed")
    subject = small()
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend} | config}
    check_patched(subject.model, lambda m: generated(m, subject.padded, attention_mask=subject.mask, **options))


@pytest.mark.parametrize(
    "kind",
    ["static", FP8, pytest.param("grouped-codes", marks=older.lacks("quantized caches that reorder")), "sliding"],
)
def test_beams_reorder_every_cache(kind: str) -> None:
    subject = small()
    check_patched(subject.model, lambda m: generated(m, subject.ids, num_beams=3, cache=CACHES[kind](m)))


class Stream:
    """Stands in for a stream of an accelerator."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...


@pytest.mark.parametrize("kind", ["dynamic", "latent", "static"])
def test_offloaded_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator nothing moves, so it is acted out: between ``offload`` and ``prefetch`` there is NaN."""
    makers: dict[str, Callable[[PreTrainedModel], Cache]] = {
        "dynamic": lambda m: DynamicCache(config=m.config, offloading=True),
        "latent": lambda m: mla_convert.LatentCache(m.config, offloading=True),
        "static": lambda m: StaticCache(config=m.config, max_cache_len=60, offloading=True),
    }
    held = ("rows",) if kind == "latent" else ("keys", "values")
    layers: dict[str, Any] = {"dynamic": DynamicLayer, "latent": LatentLayer, "static": StaticLayer}
    moves = []

    def offload(layer: Any) -> None:
        layer.away = {name: getattr(layer, name) for name in held}
        for name, tensor in layer.away.items():
            setattr(layer, name, torch.full_like(tensor, torch.nan))
        moves.append("offload")

    def prefetch(layer: Any) -> None:
        if getattr(layer, "away", None):
            for name, tensor in layer.away.items():
                setattr(layer, name, tensor)
            layer.away = None
            moves.append("prefetch")

    monkeypatch.setattr(cache_module, "check_offloading", lambda _: None)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream())
    monkeypatch.setattr(layers[kind], "offload", offload)
    monkeypatch.setattr(layers[kind], "prefetch", prefetch)
    used: list[Any] = []

    def run(model: PreTrainedModel) -> Outcome:
        used.append(makers[kind](model))
        return generated(model, small().ids, cache=used[-1])

    check_patched(small().model, run)
    assert moves.count("offload") == 2 * 2 * 10 and moves.count("prefetch") > 2 * 2 * 8
    assert all(type(layer) is layers[kind] for cache in used for layer in cache.layers)


@pytest.mark.parametrize("kind", ["dynamic", "latent", "static", "grouped-codes"])
@torch.inference_mode()
def test_prefix_reuse(subject: Subject, kind: str) -> None:
    """A cache filled once, copied, and continued twice, each differently; the original copy stays as it was."""
    prefix, model = subject.ids[:1, :10], subject.model
    others = [torch.cat((prefix, subject.ids[:1, at : at + 4]), dim=1) for at in (3, 8)]

    def run(model: PreTrainedModel) -> list[Outcome]:
        filled = CACHES[kind](model)
        model(prefix, cache=filled)
        return [generated(model, ids, cache=copy.deepcopy(filled), max_new_tokens=6) for ids in others]

    expected = run(model)
    with mla_convert.patched(model):
        found = run(model)
    for ours, theirs, ids in zip(found, expected, others, strict=True):
        check_same(ours, theirs)
        if kind == "latent":
            check_same(ours, generated(model, ids, max_new_tokens=6))


@pytest.mark.parametrize("kind", ["dynamic", "latent", "static", FP8])
@torch.inference_mode()
def test_copies_of_a_prefix_grow_apart(kind: str) -> None:
    """Two copies continued in turns: neither writes into what the other has stored."""
    subject = small()

    def run(model: PreTrainedModel) -> torch.Tensor:
        filled = CACHES[kind](model)
        model(subject.ids[:, :10], cache=filled)
        copies = [copy.deepcopy(filled), copy.deepcopy(filled)]
        turns = [(cache, ids[:, i : i + 1]) for i in range(10, 14) for cache, ids in zip(copies, both, strict=True)]
        return torch.cat([model(token, cache=cache).logits for cache, token in turns], dim=1)

    both = subject.ids, subject.ids.flip(1)
    expected = run(subject.model)
    with mla_convert.patched(subject.model):
        assert models.relative(run(subject.model), expected) <= BOUND


@pytest.mark.parametrize("implementation", [None, pytest.param("static", marks=pytest.mark.slow)])
def test_chunked_prefill_with_every_chunk_size(implementation: str | None) -> None:
    subject = small()
    plain = generated(subject.model, subject.ids, max_new_tokens=3)
    for size in range(1, subject.ids.shape[1] + 1):
        options = {"prefill_chunk_size": size, "max_new_tokens": 3, "cache_implementation": implementation}
        found = check_patched(subject.model, lambda m, options=options: generated(m, subject.ids, **options))
        check_same(found, plain)


def test_chunked_prefill_of_a_padded_batch(subject: Subject) -> None:
    options = {"prefill_chunk_size": 5, "attention_mask": subject.mask}
    check_patched(subject.model, lambda m: generated(m, subject.padded, **options))
