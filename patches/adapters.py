"""PEFT's LoRA on a projection: one weight for the base and the adapters that count.

A LoRA layer computes ``x·Wᵀ + Σ s·(x·Aᵀ)·Bᵀ`` over its active adapters, which is ``x·(W + Σ s·B·A)ᵀ``. Merged adapters
are in W already; disabled ones are left out. The sum is formed in float32 (or wider) and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.errors import PatchError
from mla_convert.patches.forms import Projection, Reader, kinds

_LORA = "peft.tuners.lora.layer.LoraLayer"
#: What finds the reader of the projection below the adapters.
Find = Callable[[str, Projection], Reader]


def is_lora(linear: Projection) -> bool:
    """Whether PEFT put LoRA adapters around a projection."""
    return _LORA in kinds(linear)


def adds(linear: Projection) -> bool:
    """Whether adapters add to a projection's weight as things stand."""
    return is_lora(linear) and bool(_counting(linear))


def unwrapped(model: Any) -> Any:
    """The transformers model inside a ``PeftModel``; any other as it is."""
    return model.get_base_model() if "peft.peft_model.PeftModel" in kinds(model) else model


def lora_reader(find: Find) -> Reader:
    """The row for projections with LoRA adapters, whatever is below them."""
    return Reader(
        "LoRA adapters of PEFT",
        holds=is_lora,
        parts=lambda layer: _parts(layer, find),
        read=lambda layer: _read(layer, find),
        shape=lambda layer: find("base_layer", layer.get_base_layer()).shape(layer.get_base_layer()),
        state=_state,
        varies=_draws,
    )


def _counting(layer: Projection) -> list[str]:
    """The adapters that the layer's forward adds to its base."""
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()  # as the layer's own forward does when it finds itself so
        return []
    return [] if layer.merged else [name for name in layer.active_adapters if name in layer.lora_A]


def _state(layer: Projection) -> Hashable:
    counting = _counting(layer)
    return tuple((name, float(layer.scaling[name])) for name in counting), tuple(layer.merged_adapters)


def _parts(layer: Projection, find: Find) -> Mapping[str, Tensor]:
    base = layer.get_base_layer()
    found = dict(find("base_layer", base).parts(base))
    for name in _counting(layer):
        found[f"{name}.A"], found[f"{name}.B"] = layer.lora_A[name].weight, layer.lora_B[name].weight
    return found


def _read(layer: Projection, find: Find) -> Tensor:
    base = layer.get_base_layer()
    weight = find("base_layer", base).read(base)
    counting = _counting(layer)
    if not counting:
        return weight
    total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    for name in counting:
        _check_adapter(layer, name)
        total += layer.get_delta_weight(name).detach().to(total)
    return total


def _check_adapter(layer: Projection, name: str) -> None:
    """Refuse an adapter that is more than a product of two matrices."""
    what: Any = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else None
    if what is None and layer.lora_bias.get(name):
        what = "lora_bias=True"
    if what is not None:
        raise PatchError(
            f"the adapter {name!r} on this projection uses {what}; supported are adapters that add B·A to the weight: "
            "merge it first (merge_adapter or merge_and_unload), or leave this projection out of its targets"
        )


def _draws(layer: Projection) -> bool:
    """Whether dropout is at work in an adapter that counts."""
    dropouts = (layer.lora_dropout[name] for name in _counting(layer))
    return any(isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0 for dropout in dropouts)
