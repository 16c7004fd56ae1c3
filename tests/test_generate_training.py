"""Training, checkpointing of activations, saving, casting, copying: a patched model is still a model."""

from __future__ import annotations

import copy
import io
import json
import pathlib
import pickle
from typing import Any

import models
import pytest
import torch
from generation import check_same, generated
from patching import BOUND, steps
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.patches.originals import PREFIX

#: Absorbed wherever that is allowed.
EAGER_PATCHING = {"prefill_threshold": 100, "form": "fused"}


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the loss, by name; the model's own are cleared."""
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, exact: bool) -> None:
    assert found.keys() == expected.keys() and "model.layers.1.self_attn.kv_b_proj.weight" in found
    for name, gradient in expected.items():
        if exact:
            assert torch.equal(found[name], gradient), name
        else:
            assert float((found[name] - gradient).abs().max()) <= BOUND * float(gradient.abs().max()), name


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_backward_equals_the_original(attn: str, training: bool, runs: list[int]) -> None:
    """Under eager attention to the last bit; under sdpa the values are padded, which rounds otherwise."""
    model, ids = models.deepseek_v3(attn=attn).train(training), models.tokens(2, 9)
    expected = gradients(model, ids)
    with mla_convert.patched(model, **EAGER_PATCHING):
        found = gradients(model, ids)
    assert not runs
    check_gradients(found, expected, exact=attn == "eager")


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Layers run twice; the reentrant kind runs them without gradients first."""
    model, ids = models.deepseek_v3().train(), models.tokens(2, 9)
    plain = gradients(model, ids)
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    check_gradients(gradients(model, ids), plain, exact=False)
    with mla_convert.patched(model, **EAGER_PATCHING):
        check_gradients(gradients(model, ids), plain, exact=False)


def test_training_and_decoding_take_turns(runs: list[int]) -> None:
    """Steps of an optimizer between decodes: each decode is that of the weights of the moment."""
    model, ids = models.deepseek_v3(), models.tokens(2, 10)
    twin = copy.deepcopy(model)
    mla_convert.patch(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(3):
        check_same(generated(model, ids, max_new_tokens=4), generated(twin, ids, max_new_tokens=4))
        assert runs.count(1) == 6 * (step + 1)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            m(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_a_patched_model_saves_the_original(form: str, tmp_path: pathlib.Path) -> None:
    """The weights as they were, nothing of the patch in any file, and it loads unpatched."""
    model, ids = models.deepseek_v3(), models.tokens(2, 8)
    expected, state = generated(model, ids), {k: v.clone() for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "unpatched")
    with mla_convert.patched(model, form=form):
        model.save_pretrained(tmp_path)
        assert PREFIX not in str(model.config.to_dict()) and PREFIX not in model.config.to_json_string()
    for path in tmp_path.glob("*.json"):
        assert "mla_" not in path.read_text("utf-8"), path.name
    assert "attn_implementation" not in str(json.loads((tmp_path / "config.json").read_text("utf-8")))
    for path in (tmp_path / "unpatched").iterdir():  # the same files to the last byte
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in again.state_dict().items())
    check_same(generated(again, ids), expected)
    mla_convert.patch(again)  # and can be patched in its turn
    check_same(generated(again, ids), expected)


@pytest.mark.parametrize("form", ["factored", "fused"])
@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float64),
        lambda m: m.half().float(),
        lambda m: m.to(device="cpu:0", dtype=torch.float32),
    ],
    ids=["half", "bfloat16", "double", "half-and-back", "device"],
)
def test_casting_and_moving_a_patched_model(move: Any, form: str) -> None:
    """Afterwards it decodes as a model cast first and patched then, to the last bit: nothing is rounded twice."""
    ids = models.tokens(2, 9)
    model, reference = (models.deepseek_v3(first_k_dense_replace=2) for _ in range(2))
    mla_convert.patch(move(reference), form=form)
    mla_convert.patch(model, form=form)
    steps(model, ids, DynamicCache(), [4, 1])  # weights in use before the move
    move(model)
    with torch.inference_mode():
        found = steps(model, ids, DynamicCache(), [4, 1, 1, 2, 1])
        assert torch.equal(found, steps(reference, ids, DynamicCache(), [4, 1, 1, 2, 1]))


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_copies_and_pickles_generate_on_their_own(form: str) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 8)
    expected = generated(model, ids)
    handle = mla_convert.patch(model, form=form)
    generated(model, ids)
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    copies = [copy.deepcopy(model), pickle.loads(buffer.getvalue())]
    handle.unpatch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in copies:
        check_same(generated(other, ids), expected)
        mla_convert.unpatch(other)
        check_same(generated(other, ids), expected)
