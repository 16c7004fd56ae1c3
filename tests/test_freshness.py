"""After the source weights change, the next step follows or fails; nothing is ever stale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import PatchError, StaleWeightsError
from mla_convert.patches.forms import bare_weight
from mla_convert.patches.layer import layer_of


def weight(model: PreTrainedModel, name: str) -> torch.nn.Parameter:
    return model.model.layers[1].self_attn.get_submodule(name).weight


def change_in_place(model: PreTrainedModel, name: str) -> None:
    with torch.no_grad():
        weight(model, name)[3, 2] += 1.0


def change_data_in_place(model: PreTrainedModel, name: str) -> None:
    weight(model, name).data.mul_(1.3)


def replace_data(model: PreTrainedModel, name: str) -> None:
    new = weight(model, name).data.clone()
    new[3, 2] += 1.0
    weight(model, name).data = new


def replace_parameter(model: PreTrainedModel, name: str) -> None:
    module = model.model.layers[1].self_attn.get_submodule(name)
    module.weight = torch.nn.Parameter(module.weight.detach() * 1.3)


def load_other(model: PreTrainedModel, name: str) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state[f"model.layers.1.self_attn.{name}.weight"] *= 1.3
    model.load_state_dict(state)


def optimizer_step(model: PreTrainedModel, name: str) -> None:
    optimizer = torch.optim.Adam([weight(model, name)], lr=0.1)
    ids = models.tokens(2, 8)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [change_in_place, change_data_in_place, replace_data, replace_parameter, load_other, optimizer_step]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["kv_b_proj", "q_b_proj", "o_proj"])
@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
def test_the_next_step_follows(form: dict[str, str], name: str, change: Callable[..., None]) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 9)
    with torch.no_grad():
        before = model(ids).logits

    def step() -> torch.Tensor:
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :8], cache=cache)
            return model(ids[:, 8:], cache=cache).logits

    with mla_convert.patched(model, **form):
        assert models.relative(step(), before[:, 8:]) <= 1e-4
        change(model, name)
        found = step()
    with torch.no_grad():
        expected = model(ids).logits[:, 8:]
    assert models.relative(expected, before[:, 8:]) > 1e-3
    assert models.relative(found, expected) <= 1e-4


def test_unchanged_weights_are_not_derived_again(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    caplog.set_level(logging.INFO, logger="mla_convert")
    with mla_convert.patched(model, form="fused"), torch.inference_mode():
        cache = DynamicCache()
        for i in range(6):
            model(ids[:, i : i + 1], cache=cache)
        assert "anew" not in caplog.text
        change_in_place(model, "o_proj")
        model(ids[:, :1], cache=DynamicCache())
        assert caplog.text.count("anew") == 1 and "model.layers.1.self_attn" in caplog.text


@torch.inference_mode()
def test_parameters_made_in_inference_mode() -> None:
    """They have no version counter; the sample still notices."""
    model, ids = models.deepseek_v3(), models.tokens(1, 5)
    module = model.model.layers[0].self_attn.kv_b_proj
    module.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)
    assert module.weight.is_inference()
    with mla_convert.patched(model):
        model(ids[:, :1])
        module.weight.mul_(1.3)
        cache = DynamicCache()
        found = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(5)], 1)
    assert models.relative(found, model(ids).logits) <= 1e-4


@pytest.mark.parametrize("name", ["kv_b_proj", "q_b_proj", "o_proj"])
@torch.inference_mode()
def test_a_replaced_projection_is_refused(name: str) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 5)
    attention = model.model.layers[0].self_attn
    old = getattr(attention, name)
    with mla_convert.patched(model, form="fused"):
        setattr(attention, name, Wrapped(old))
        with pytest.raises(StaleWeightsError, match=f"{name} was replaced by a Wrapped"):
            model(ids[:, :1])
        setattr(attention, name, old)
        model(ids[:, :1])


@pytest.mark.parametrize(
    ("name", "form"), [("kv_b_proj", "factored"), ("kv_b_proj", "fused"), ("q_b_proj", "fused")], ids=str
)
@torch.inference_mode()
def test_a_bias_is_refused(name: str, form: str) -> None:
    """Before and after patching; the output projection's is added, and nobody minds the query's where it runs."""
    model, ids = models.deepseek_v3(), models.tokens(1, 5)
    projection = model.model.layers[0].self_attn.get_submodule(name)
    mla_convert.patch(model, form=form)
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    with pytest.raises(StaleWeightsError, match=f"since the model was patched, {name} has a bias, which an absorbed"):
        model(ids[:, :1])
    mla_convert.unpatch(model)
    with pytest.raises(PatchError, match=f"{name} has a bias, .*: run the model unpatched"):
        mla_convert.patch(model, form=form)


@pytest.mark.parametrize("bias", ["before", "after"])
@torch.inference_mode()
def test_a_bias_that_still_counts(bias: str) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 5)
    attention = model.model.layers[0].self_attn

    def add(name: str) -> None:
        projection = attention.get_submodule(name)
        projection.bias = torch.nn.Parameter(torch.linspace(-1, 1, projection.out_features))

    if bias == "before":
        add("q_b_proj")
        add("o_proj")
    with mla_convert.patched(model, vo="fused"):
        if bias == "after":
            add("q_b_proj")
            add("o_proj")
        cache = DynamicCache()
        found = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(5)], 1)
    assert models.relative(found, model(ids).logits) <= 1e-4


@pytest.mark.parametrize(
    ("name", "form"),
    [("kv_b_proj", "factored"), ("kv_b_proj", "fused"), ("q_b_proj", "fused"), ("o_proj", "fused")],
    ids=str,
)
@torch.inference_mode()
def test_a_forward_that_is_set_on_a_projection_is_refused(name: str, form: str) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 5)
    projection = model.model.layers[0].self_attn.get_submodule(name)
    with mla_convert.patched(model, form=form):
        expected = model(ids[:, :1]).logits
        before = projection.__dict__.get("forward")
        projection.forward = lambda x, *args: 0 * torch.nn.functional.linear(x, projection.weight)
        for _ in range(2):
            with pytest.raises(StaleWeightsError, match=f"{name} has a forward of its own, .*del module.forward"):
                model(ids[:, :1])
        del projection.forward
        if before is not None:
            projection.forward = before
        assert torch.equal(model(ids[:, :1]).logits, expected)


class Wrapped(torch.nn.Module):
    """An adapter around a projection."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 1.1


@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
@torch.inference_mode()
def test_casting_a_patched_model(move: Callable[[Any], Any], form: dict[str, str]) -> None:
    model, ids = models.deepseek_v3(first_k_dense_replace=2), models.tokens(2, 6)
    with mla_convert.patched(model, **form):
        move(model)
        cache = DynamicCache()
        found = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(6)], 1)
    expected = model(ids).logits
    assert found.dtype == expected.dtype
    eps = torch.finfo(found.dtype).eps
    assert models.relative(found, expected) <= max(1e-4, 20 * eps)


@torch.inference_mode()
def test_refresh() -> None:
    model = models.deepseek_v3()
    with mla_convert.patched(model) as handle:
        attention = model.model.layers[0].self_attn
        layer = layer_of(attention)
        assert layer is not None
        layer.w_uv.zero_()
        handle.refresh()
        heads = attention.kv_b_proj.weight.view(3, 28, 40)
        assert torch.equal(layer.w_uv, heads[:, 16:]) and torch.equal(layer.w_uk_t, heads[:, :16].transpose(1, 2))


def test_the_short_way_to_a_weight_is_for_bare_projections_alone() -> None:
    """What is anything more than ``nn.Linear`` with a plain weight takes the long way, and is looked at closely."""
    plain = nn.Linear(4, 6)
    plain.register_forward_hook(lambda *_: None)  # hooks are asked for apart
    assert bare_weight(plain) is plain.weight
    marked = [nn.Linear(4, 6) for _ in range(3)]
    for linear, mark in zip(marked, ("_hf_hook", "quantization_scheme", "weight"), strict=True):
        linear.__dict__[mark] = object()
    inner, integers, derived = nn.Linear(4, 6), nn.Linear(4, 6), type("Other", (nn.Linear,), {})(4, 6)
    inner.add_module("adapter", nn.Identity())
    integers.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
    replaced = nn.Linear(4, 6)
    del replaced.weight
    replaced.register_buffer("weight", torch.zeros(6, 4))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    for linear in (*marked, inner, integers, derived, replaced, parametrized, nn.Identity()):
        assert bare_weight(linear) is None
