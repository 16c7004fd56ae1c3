"""A patch leaves nothing behind, and copies, pickles, threads and neighbours of a patched model stand alone."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import models
import pytest
import torch
from patching import BOUND, FORMS, layers, state_of, steps
from transformers import DynamicCache

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.patches import apply, installing


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.inference_mode()
def test_unpatch_gives_the_model_back(form: dict[str, str], attn: str) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 10)
    before, logits, state = state_of(model), model(ids).logits, model.state_dict()
    handle = mla_convert.patch(model, **form)
    steps(model, ids, DynamicCache(), [5, 1, 1, 3])
    assert list(model.state_dict()) == list(state)
    handle.unpatch()
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_an_exception_restores_and_leaves_no_call_behind() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 4)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="stop"), mla_convert.patched(model, form="fused"):
        layer = layers(model)[0]
        model.model.layers[0].self_attn.kv_a_proj_with_mqa.register_forward_hook(_stop)
        try:
            with torch.inference_mode():
                model(ids[:, :1])
        finally:
            assert layer.slot.get() is None
            model.model.layers[0].self_attn.kv_a_proj_with_mqa._forward_hooks.clear()
    assert state_of(model) == before


def _stop(*_: Any, **__: Any) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("apply.install", 1),
        ("installing.FusedOutput", 1),
        ("apply.PreTrainedModel.set_attn_implementation", 0),
        ("apply.add_refusals", 0),
        ("apply.PatchHandle.describe", 0),
    ],
)
@torch.inference_mode()
def test_a_patch_that_fails_half_way_is_taken_back(where: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at the second layer, between its two projections, or when everything is installed."""
    model, ids = models.deepseek_v3(), models.tokens(2, 10)
    before, logits = state_of(model), model(ids).logits
    path = f"mla_convert.patches.{where}"
    module, _, name = where.partition(".")
    original: Any = getattr({"apply": apply, "installing": installing}[module], name, None)
    calls: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return _stop() if len(calls) > after else original(*args, **kwargs)

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="stop"):
        broken.setattr(path, failing)
        mla_convert.patch(model, form="fused")
    assert calls and state_of(model) == before and model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, logits)
    mla_convert.patch(model, form="fused").unpatch()


@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
@torch.inference_mode()
def test_copies_and_pickles_are_patched_and_independent(form: dict[str, str]) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 10)
    expected = model(ids).logits
    mla_convert.patch(model, **form)
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(buffer.getvalue())):
        assert models.relative(steps(other, ids, DynamicCache(), [6, 1, 1, 1, 1]), expected) <= BOUND
        for source in (s for layer in layers(other) for s in layer.sources):
            assert not any(source.linear is module for module in model.modules())
            assert any(source.linear is module for module in other.modules())
        mla_convert.unpatch(other)
        assert torch.equal(other(ids).logits, expected)
    assert len(layers(model)) == 2
    assert models.relative(steps(model, ids, DynamicCache(), [6, 1, 1, 1, 1]), expected) <= BOUND


@torch.inference_mode()
def test_a_pickle_registers_what_it_needs() -> None:
    """The process that loads it may never have seen the original attention that lies under the patch."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    registries = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [set(registry) for registry in registries]
    AttentionInterface.register("house_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("house_attention", sdpa_mask)
    try:
        model, ids = models.deepseek_v3(), models.tokens(2, 8)
        model.set_attn_implementation("house_attention")
        expected = model(ids).logits
        mla_convert.patch(model)
        stored = pickle.dumps(model)
        for registry in registries:
            del registry[model.config._attn_implementation]
        other = pickle.loads(stored)
        assert models.relative(steps(other, ids, DynamicCache(), [4, 1, 3]), expected) <= BOUND
    finally:
        for registry, names in zip(registries, before, strict=True):
            for name in set(registry) - names:
                del registry[name]


@torch.inference_mode()
def test_a_model_that_shares_the_config_is_left_alone() -> None:
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 8)
    other = type(model)(model.config).eval()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = other(ids, attention_mask=mask).logits
    with mla_convert.patched(model):
        assert other.config._attn_implementation != "eager"
        found = other(ids, attention_mask=mask).logits
    assert models.relative(found[1], expected[1]) <= BOUND and models.relative(found[0, 3:], expected[0, 3:]) <= BOUND


def test_threads_decode_one_model_and_two() -> None:
    one, two = models.deepseek_v3(), models.deepseek_v3(seed=5)
    ids = [models.tokens(1, 40, seed=i) for i in range(4)]
    jobs = [(one, ids[0]), (one, ids[1]), (two, ids[2]), (two, ids[3])]
    with torch.inference_mode():
        expected = [model(tokens).logits for model, tokens in jobs]
    found: list[torch.Tensor | None] = [None] * 4

    def work(i: int) -> None:
        with torch.inference_mode():
            found[i] = steps(jobs[i][0], jobs[i][1], DynamicCache(), [10, 1, 1, 8] + [1] * 20)

    with mla_convert.patched(one, form="fused"), mla_convert.patched(two, form="fused"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for logits, reference in zip(found, expected, strict=True):
        assert logits is not None and models.relative(logits, reference) <= BOUND


def test_parts_and_owners_are_patched_once() -> None:
    model = models.deepseek_v3()
    before = state_of(model)
    for first, second in ((model, model.model), (model.model, model)):
        handle = mla_convert.patch(first)
        with pytest.raises(PatchError, match="patched already"):
            mla_convert.patch(second)
        handle.unpatch()
        assert state_of(model) == before


@torch.inference_mode()
def test_one_config_object_carries_one_patch() -> None:
    model = models.deepseek_v3()
    other = type(model)(model.config).eval()
    with mla_convert.patched(model), pytest.raises(PatchError, match="shares its config"):
        mla_convert.patch(other)
    mla_convert.patch(other).unpatch()
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_attention_changed_under_the_patch_is_refused() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 4)
    expected = model(ids).logits
    for chosen in ("eager", "sdpa"):
        handle = mla_convert.patch(model)
        model.set_attn_implementation(chosen)
        with pytest.raises(PatchError, match=f"changed to {chosen!r}"):
            model(ids)
        handle.unpatch()
        assert model.config._attn_implementation == chosen  # the caller's later choice
        other = models.deepseek_v3(attn=chosen)
        assert torch.equal(model(ids).logits, other(ids).logits)
    assert torch.equal(model(ids).logits, expected)


@torch.inference_mode()
def test_projections_replaced_under_the_patch_stay() -> None:
    """A wrapper that an adapter library put around a projection, which the fused form had given a forward."""
    model, ids = models.deepseek_v3(), models.tokens(1, 4)
    expected = model(ids).logits
    handle = mla_convert.patch(model, form="fused")
    attention = model.model.layers[0].self_attn
    inner = attention.o_proj
    attention.o_proj = torch.nn.Sequential(inner)
    with pytest.raises(PatchError, match="o_proj was replaced by a Sequential"):
        model(ids[:, :1])
    handle.unpatch()
    assert isinstance(attention.o_proj, torch.nn.Sequential) and "forward" not in vars(inner)
    assert torch.equal(model(ids).logits, expected)
