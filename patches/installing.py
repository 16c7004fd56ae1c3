"""What patching sets on one attention module, and how it is taken off again."""

from __future__ import annotations

from typing import Any

from torch import nn

from mla_convert.patches.attention import begin_call, end_call, passed_through
from mla_convert.patches.fused import FusedOutput, FusedQuery
from mla_convert.patches.layer import ATTRIBUTE, AbsorbedLayer, layer_of
from mla_convert.patches.modules import query_name
from mla_convert.patches.selection import METHOD, KeptSelection


def install(module: nn.Module, layer: AbsorbedLayer) -> None:
    """Let ``module`` compute as ``layer`` says."""
    module.add_module(ATTRIBUTE, layer)
    module.expand_kv = passed_through  # type: ignore[assignment]
    if hasattr(type(module), METHOD):
        setattr(module, METHOD, KeptSelection(layer))
    module.register_forward_pre_hook(begin_call, with_kwargs=True)
    module.register_forward_hook(end_call, always_call=True)
    if layer.forms.qk == "fused":
        name = query_name(module)
        layer.forwards[name] = FusedQuery(layer, getattr(module, name))
    if layer.forms.vo == "fused":
        layer.forwards["o_proj"] = FusedOutput(layer, module.o_proj)


def uninstall(module: nn.Module) -> None:
    """Undo :func:`install`, however far it came."""
    layer = layer_of(module)
    if layer is None:
        return
    for forward in layer.forwards.values():
        forward.remove()
    _remove_hook(module, begin_call)
    _remove_hook(module, end_call)
    for name in (METHOD, "expand_kv"):
        module.__dict__.pop(name, None)
    delattr(module, ATTRIBUTE)


def _remove_hook(module: nn.Module, function: Any) -> None:
    """Remove a forward (pre-)hook by its function: the handles of hooks do not survive copying a model."""
    for hooks, extras in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for number in [number for number, hook in hooks.items() if hook is function]:
            for table in (hooks, *extras):
                table.pop(number, None)
