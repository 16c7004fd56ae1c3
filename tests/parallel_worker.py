"""One of several processes that hold a model together: decodes with it, and writes what came out.

Run by ``tests/test_parallel.py`` under ``torch.distributed.run``: FOLDER has a checkpoint for each case, and gets
``CASE.RANK.pt``.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import models
import torch
from patching import layers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.patches import tp_plan

#: Case -> checkpoint, and the arguments of ``DistributedConfig`` (a plan of None is the model's own).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-own-plan": ("deepseek_v2", {"tp_size": 2}),
    "glm4-own-plan": ("glm4_moe_lite", {"tp_size": 2}),
    "v3-own-plan": ("deepseek_v3", {"tp_size": 2}),
    "v3-our-plan": ("deepseek_v3", {"tp_size": 2, "tp_plan": tp_plan}),
    "v3-pipeline": ("deepseek_v3", {"pp_size": 2}),
}
IDS = models.tokens(2, 9)
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0


@torch.no_grad()
def decode(model: PreTrainedModel, *, padded: bool = True) -> dict[str, torch.Tensor]:
    """Tokens of greedy generation from a left-padded batch, and the logits [B, steps, vocabulary] they came from.

    Without padding in a pipeline: transformers' later stages lose it, for they ask layer 0 for the cache's length.
    """
    padding = {} if not padded or getattr(model, "_pp_stage", None) else {"attention_mask": MASK}
    out = model.generate(
        IDS, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **padding
    )
    return {"tokens": out.sequences, "logits": torch.stack(out.logits, 1)}


def refusal(model: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
    try:
        mla_convert.patch(model, *args, **kwargs)
    except UsageError as error:
        return str(error)
    mla_convert.unpatch(model)
    return ""


def run(case: str, folder: pathlib.Path) -> dict[str, Any]:
    """What one case gives, patched and not."""
    checkpoint, given = CASES[case]
    config = AutoConfig.from_pretrained(folder / checkpoint)
    given = {key: value(config) if callable(value) else value for key, value in given.items()}
    distributed = DistributedConfig(**given)
    model = AutoModelForCausalLM.from_pretrained(folder / checkpoint, distributed_config=distributed).eval()
    found: dict[str, Any] = {"original": decode(model)}
    found["fused"] = refusal(model, form="fused")
    found["folder"] = refusal(model, folder / "absorbed") if checkpoint == "deepseek_v3" else ""
    handle = mla_convert.patch(model)
    found |= {"patched": decode(model), "description": str(handle.describe())}
    found["heads"] = {layer.name: layer.geometry.num_heads for layer in layers(model)}
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                weight = module.kv_b_proj.weight
                getattr(weight, "_local_tensor", weight).mul_(0.7)
    found["edited"] = decode(model)
    handle.unpatch()
    found["unpatched"] = decode(model)
    return found


if __name__ == "__main__":
    where = pathlib.Path(sys.argv[1])
    for name in CASES:
        result = run(name, where)
        torch.save(result, where / f"{name}.{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
