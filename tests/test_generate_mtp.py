"""Self-speculation: the model's own layers for multi-token prediction draft, and all its layers check."""

from __future__ import annotations

import pathlib
from typing import Any

import models
import pytest
import torch
from generation import check_patched, check_same, generated
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

IDS = models.tokens(1, 12)
#: Layers that draft, behind the two of the model.
DRAFTING = 2


def with_drafting_layers(folder: pathlib.Path) -> PreTrainedModel:
    """DeepSeek-V3 with layers that draft: near copies of its last one, so that proposals are taken now and then.

    ``generate`` reads them from the folder; transformers does not save them.
    """
    models.deepseek_v3(num_nextn_predict_layers=DRAFTING).save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    generator = torch.Generator().manual_seed(0)
    width = stored["model.norm.weight"].numel()
    ones, both = torch.ones(width), torch.cat((0.1 * torch.eye(width), torch.eye(width)), dim=1)
    for layer in range(2, 2 + DRAFTING):
        for name, tensor in list(stored.items()):
            if name.startswith("model.layers.1."):
                noise = torch.randn(tensor.shape, generator=generator)
                stored[name.replace("layers.1.", f"layers.{layer}.")] = tensor * (1 + 0.05 * noise)
        extra = {"enorm": ones, "hnorm": ones, "eh_proj": both, "shared_head.norm": ones}
        stored |= {f"model.layers.{layer}.{name}.weight": tensor.clone() for name, tensor in extra.items()}
    save_file(stored, path, metadata={"format": "pt"})
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    # transformers finds the layers by the pattern of those that the model ignores, written for 61 layers.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return with_drafting_layers(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize(
    "patching", [{}, {"form": "fused"}, {"prefill_threshold": 0}, {"prefill_threshold": 100}], ids=str
)
def test_drafts_of_the_model_s_own_layers(model: PreTrainedModel, patching: dict[str, Any], runs: list[int]) -> None:
    plain = generated(model, IDS, max_new_tokens=12)
    found = check_patched(model, lambda m: generated(m, IDS, max_new_tokens=12, use_mtp=True), **patching)
    check_same(found, plain)
    if patching.get("prefill_threshold") != 0:
        assert max(runs) > 1  # several drafted tokens are checked at once, absorbed
