"""accelerate's hooks: weights that are on another device, in memory or on disk between calls."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from patching import BOUND, layers, steps
from transformers import DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import PatchError, UsageError

IDS = models.tokens(2, 9)
SIZES = [6, 1, 1, 1]


def to_memory(model: PreTrainedModel, folder: pathlib.Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))


def to_memory_with_buffers(model: PreTrainedModel, folder: pathlib.Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def to_disk(model: PreTrainedModel, folder: pathlib.Path) -> None:
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def half_to_disk(model: PreTrainedModel, folder: pathlib.Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    dispatch_model(
        model, places | {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}, offload_dir=str(folder)
    )


def one_projection(model: PreTrainedModel, folder: pathlib.Path) -> None:
    for layer in model.model.layers:
        cpu_offload(layer.self_attn.kv_b_proj, execution_device=torch.device("cpu"))


WAYS = [to_memory, to_memory_with_buffers, to_disk, half_to_disk, one_projection]


def held(model: PreTrainedModel) -> list[bool]:
    """For each attention module, whether it keeps absorbed weights at the moment."""
    return [any(buffer.numel() for buffer in layer.buffers()) for layer in layers(model)]


def offloaded(model: PreTrainedModel) -> list[bool]:
    return [layer.self_attn.kv_b_proj.weight.is_meta for layer in model.model.layers]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("first", ["offload", "patch"])
@torch.no_grad()
def test_offloaded_weights(way: Callable[..., None], first: str, tmp_path: pathlib.Path) -> None:
    """They are read for each call and let go after it, with the absorbed weights, whichever came first."""
    model = models.deepseek_v3()
    expected = steps(model, IDS, DynamicCache(), SIZES)
    if first == "offload":
        way(model, tmp_path)
    handle = mla_convert.patch(model)
    if first == "patch":
        way(model, tmp_path)
    for _ in range(2):
        assert models.relative(steps(model, IDS, DynamicCache(), SIZES), expected) <= BOUND
        assert any(offloaded(model)) and held(model) == [not away for away in offloaded(model)]
    handle.unpatch()
    assert models.relative(steps(model, IDS, DynamicCache(), SIZES), expected) <= BOUND
    assert any(offloaded(model))
    remove_hook_from_submodules(model)


@torch.no_grad()
def test_generate_with_offloaded_weights(tmp_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    half_to_disk(model, tmp_path)
    with mla_convert.patched(model):
        assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)


@torch.no_grad()
def test_weights_that_come_back_and_go_again(tmp_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    expected = steps(model, IDS, DynamicCache(), SIZES)
    with mla_convert.patched(model):
        for _ in range(2):
            to_memory(model, tmp_path)
            assert models.relative(steps(model, IDS, DynamicCache(), SIZES), expected) <= BOUND
            assert held(model) == [False, False]
            remove_hook_from_submodules(model)
            assert models.relative(steps(model, IDS, DynamicCache(), SIZES), expected) <= BOUND
            assert held(model) == [True, True]


@torch.no_grad()
def test_edits_of_offloaded_weights(tmp_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    to_memory(model, tmp_path)
    with mla_convert.patched(model):
        before = steps(model, IDS, DynamicCache(), SIZES)
        model.model.layers[1].self_attn.kv_b_proj._hf_hook.weights_map["weight"].data.mul_(1.3)
        found = steps(model, IDS, DynamicCache(), SIZES)
    assert models.relative(found, steps(model, IDS, DynamicCache(), SIZES)) <= BOUND < models.relative(found, before)


@torch.no_grad()
def test_products_are_not_made_anew_for_each_token(tmp_path: pathlib.Path) -> None:
    """The default leaves the weights of an offloaded model factored; fused is refused, at once or when they go away."""
    model = models.deepseek_v3(**models.BOTH_FUSED)
    expected = steps(model, IDS, DynamicCache(), SIZES)
    fused = copy.deepcopy(model)
    mla_convert.patch(fused)
    to_memory(fused, tmp_path)
    with pytest.raises(PatchError, match="offloaded after the model was patched.*factored"):
        steps(fused, IDS, DynamicCache(), SIZES)
    to_memory(model, tmp_path)
    with pytest.raises(UsageError, match="q_b_proj cannot be fused: its weight is offloaded"):
        mla_convert.patch(model, form="fused")
    with mla_convert.patched(model) as handle:
        assert (handle.describe().qk_form, handle.describe().vo_form) == ("factored", "factored")
        assert models.relative(steps(model, IDS, DynamicCache(), SIZES), expected) <= BOUND


@torch.no_grad()
def test_weights_of_a_folder_are_not_for_offloaded_models(example_path: Any, tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    mla_convert.convert(example_path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(example_path)
    mla_convert.patch(model, tmp_path / "out")
    to_memory(model, tmp_path)
    with pytest.raises(PatchError, match="offloaded after the model was patched.*without a folder"):
        model(IDS[:, :1])
    mla_convert.unpatch(model)
    with pytest.raises(UsageError, match="kv_b_proj is offloaded.*leave the folder out"):
        mla_convert.patch(model, tmp_path / "out")


def test_weights_that_were_never_loaded() -> None:
    model = models.deepseek_v3()
    model.model.layers[1].self_attn.kv_b_proj.to("meta")
    with pytest.raises(PatchError, match=r"kv_b_proj\.weight is on the meta device: load"):
        mla_convert.patch(model)
