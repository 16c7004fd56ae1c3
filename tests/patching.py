"""What the tests of patched models share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.patches.layer import AbsorbedLayer, layer_of

#: Largest logit difference over the range in float32, from the design.
BOUND = 1e-4
FORMS = [{}, {"form": "fused"}, {"qk": "fused", "vo": "factored"}, {"qk": "factored", "vo": "fused"}]


def layers(model: PreTrainedModel) -> list[AbsorbedLayer]:
    return [layer for module in model.modules() if (layer := layer_of(module))]


def steps(model: PreTrainedModel, ids: torch.Tensor, cache: Any, sizes: list[int], **kwargs: Any) -> torch.Tensor:
    """Logits [B, S, vocabulary] of ``ids`` fed in pieces of ``sizes``."""
    outs, at = [], 0
    for size in sizes:
        more = {k: v[:, : at + size] if k == "attention_mask" else v for k, v in kwargs.items()}
        outs.append(model(ids[:, at : at + size], cache=cache, use_cache=True, **more).logits)
        at += size
    return torch.cat(outs, dim=1)


def expanded_widths(kind: Any, monkeypatch: Any) -> list[int]:
    """How many tokens ``expand_kv`` of an attention class is given, call by call, from now on."""
    widths: list[int] = []
    expand = kind.expand_kv

    def noting(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        widths.append(kv_nope.shape[2])
        return expand(self, kv_nope, k_rot)

    monkeypatch.setattr(kind, "expand_kv", noting)
    return widths


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that patching could leave behind."""
    parts: dict[str, Any] = {"config": dict(vars(model.config)), "keys": sorted(vars(model))}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ("config", "training")}
        tables = {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)}
        parts[name] = (own, {k: list(v) for k, v in tables.items()})
    return parts
