"""Sharding the heads of MLA attention over processes, for models whose own plan leaves attention whole."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.patches.adapters import unwrapped
from mla_convert.patches.layer import layer_of
from mla_convert.patches.loading import class_for
from mla_convert.patches.recognition import attention_modules

#: How transformers' parallel styles split each part of an attention module. Rows of ``kv_b_proj`` and of the query's
#: projection are grouped by head, as are the columns of ``o_proj``; what is cached is the same in every process.
STYLES = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
#: Parts that every process has whole. Of what is in neither table, the heads are not known.
WHOLE = frozenset(("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "rotary_emb"))


def tp_plan(model: Any) -> dict[str, str]:
    """The tensor parallel plan of a model, with the heads of its attention sharded.

    It is for loading: ``from_pretrained(…, distributed_config=DistributedConfig(tp_size=…, tp_plan=tp_plan(config)))``,
    and then ``patch``; the number of heads must be a multiple of the number of processes. transformers 5.16 itself
    passes over a plan that is given so, and attention stays whole in each process.

    Args:
        model: a transformers model, or the config of one.

    Returns:
        Styles of ``transformers`` by module name, layer numbers as ``*``: the model's own plan, and rules for attention
        where that has none.

    Raises:
        PatchError: a model that is patched.
        UnsupportedModelError: no MLA attention, or attention with further parts that belong to heads.
        CheckpointError: transformers has no generating model for the config.
    """
    whole = _skeleton(model)
    if any(layer_of(module) for module in whole.modules()):
        raise PatchError("the plan is for a model as it is loaded, and this one is patched: ask before, or unpatch it")
    plan: dict[str, str] = dict(whole.tp_plan or {})
    for name, module in attention_modules(whole):
        where = re.sub(r"\d+", "*", name)
        if f"{where}.kv_b_proj" in plan:
            continue
        parts = {part for part, child in module.named_children() if child is not None}
        unknown = sorted(parts - STYLES.keys() - WHOLE) + [name for name, _ in module.named_parameters(recurse=False)]
        if unknown:
            raise UnsupportedModelError(
                f"{name} has {', '.join(unknown)}, which may belong to heads, and no plan is known for it; "
                "load the model without attention in the plan, where it stays whole in each process"
            )
        plan |= {f"{where}.{part}": style for part, style in STYLES.items() if part in parts}
    return plan


def _skeleton(model: Any) -> PreTrainedModel:
    """The model itself, or, from a config, its modules without memory."""
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, nn.Module) or not hasattr(model, "model_type"):
        raise UsageError(f"tp_plan takes a transformers model or its config, found {type(model).__name__}")
    kind: Any = class_for(model)
    with torch.device("meta"):
        built: PreTrainedModel = kind(model)
    return built
