"""``patch``, ``unpatch`` and ``patched``: in place, and reversible to the last attribute."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mla_convert.absorption import Form, Forms, choose_form
from mla_convert.architectures import FAMILIES, Family
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.kernels.dispatch import choose_backend, describe_backend, warm_up
from mla_convert.patches.adapters import unwrapped
from mla_convert.patches.attention import PREFIX, begin_call, end_call, passed_through, registered_name
from mla_convert.patches.forms import PLAIN
from mla_convert.patches.fused import FusedOutput, FusedQuery
from mla_convert.patches.layer import ATTRIBUTE, AbsorbedLayer, Options, layer_of
from mla_convert.patches.refusals import add_refusals, remove_refusals
from mla_convert.patches.sidecar import Asked, Sidecar
from mla_convert.patches.sources import check_fusable, check_readable, check_whole, only_plain
from mla_convert.patches.versions import check_transformers
from mla_convert.patches.weights import module_geometry, query_name
from mla_convert.recipe import parse_forms

logger = logging.getLogger(__name__)

CACHES = ("latent", "dynamic")
_STATE = "_mla_patch"


@dataclasses.dataclass(frozen=True)
class PatchState:
    """What ``unpatch`` needs to know of a patched model; copied and pickled with it."""

    family: str
    original: str
    options: Options
    sidecar: str | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        registered_name(self.original)  # an unpickled model may be the first one patched in this process


@dataclasses.dataclass(frozen=True)
class PatchDescription:
    """What runs in a patched model; ``str()`` of it is for people, ``to_dict()`` for programs."""

    family: str
    qk_form: str
    vo_form: str
    weights_from: str
    backend: str
    prefill_threshold: int | str
    cache: str
    original_attention: str
    layers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dataclasses.asdict(self) | {"layers": list(self.layers)}

    def __str__(self) -> str:
        threshold = self.prefill_threshold
        rule = "by cost" if threshold == "auto" else f"up to {threshold} new tokens"
        first, last = self.layers[0], self.layers[-1]
        return (
            f"{self.family}: {len(self.layers)} attention modules patched ({first} … {last})\n"
            f"  key side {self.qk_form}, value side {self.vo_form}, weights from {self.weights_from}\n"
            f"  absorbed {rule}, backend {self.backend}; else expanded through {self.original_attention}\n"
            f"  cache: {self.cache}"
        )


class PatchHandle:
    """A patched model: what runs in it, and the way back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def describe(self) -> PatchDescription:
        """Family, form of each side, backend, threshold, cache and the layers patched."""
        state, layers = _state_of(self.model), _patched_layers(self.model)
        device = layers[0].sources[0].device
        return PatchDescription(
            family=state.family,
            qk_form="/".join(sorted({layer.forms.qk for layer in layers})),
            vo_form="/".join(sorted({layer.forms.vo for layer in layers})),
            weights_from=state.sidecar or _read_through(layers),
            backend=describe_backend(state.options.backend, device),
            prefill_threshold=state.options.prefill_threshold,
            cache=state.options.cache,
            original_attention=state.original,
            layers=tuple(layer.name for layer in layers),
        )

    def refresh(self) -> None:
        """Make the absorbed weights anew from the model's own; needed after edits to a model that runs compiled."""
        _state_of(self.model)
        for module in self.model.modules():
            if layer := layer_of(module):
                layer.derive(module)

    def warmup(self) -> None:
        """Compile ahead what the first steps would otherwise compile; the PyTorch backend has nothing to compile."""
        backend = _state_of(self.model).options.backend
        layers = _patched_layers(self.model)
        for g, dtype, device in dict.fromkeys(
            (layer.geometry, layer.dtype, layer.sources[0].device) for layer in layers
        ):
            heads, latent, rope = g.num_heads, g.kv_lora_rank, g.qk_rope_head_dim
            ran = warm_up(backend, device, dtype, heads=heads, latent=latent, rope=rope)
            logger.info("warmed up %d kinds of call on %s", ran, device)

    def unpatch(self) -> None:
        """Give the model back as it was; see :func:`unpatch`."""
        unpatch(self.model)


def patch(
    model: PreTrainedModel,
    absorbed: str | os.PathLike[str] | None = None,
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    backend: str = "auto",
    prefill_threshold: int | str = "auto",
    cache: str = "latent",
    allow_unknown: bool = False,
) -> PatchHandle:
    """Make ``model`` decode in latent space, in place; ``generate()`` and all else go on as before.

    Args:
        model: a transformers model with MLA attention, weights loaded; or PEFT's model around one.
        absorbed: a folder that ``convert`` wrote (or the source folder that holds one); None derives the
            absorbed weights from the model's own.
        form: "factored", "fused", or "auto": for each side the form that reads fewer numbers per step.
        qk, vo: the same for the key or the value side alone.
        backend: "auto", or the name of one backend, which then runs or fails.
        prefill_threshold: absorbed for at most this many new tokens; "auto" compares the multiplications.
        cache: "latent" gives generation a ``LatentCache``; "dynamic" leaves caches as they are.
        allow_unknown: patch attention classes that are not in the table but have the same seam.

    Returns:
        A handle with ``describe()``, ``refresh()``, ``warmup()`` and ``unpatch()``.

    Raises:
        UnsupportedModelError: no MLA attention found, or a family that is not known.
        PatchError: patched already, weights missing or in a form that cannot be read.
        MismatchError: ``absorbed`` does not belong to this model.
        UsageError: arguments that are not known, or contradict the sidecar.
    """
    check_transformers()
    model = unwrapped(model)
    asked = Asked(**parse_forms(form, qk, vo))
    options = _options(model, backend, prefill_threshold, cache)
    modules = attention_modules(model)
    _check_unpatched(model, modules)
    family = _family_of(model, [m for _, m in modules], allow_unknown=allow_unknown)
    sidecar = None if absorbed is None else Sidecar(absorbed)
    original = _text_config(modules[0][1])._attn_implementation
    registered = registered_name(original)
    layers = [_build(name, module, family, asked, options, sidecar) for name, module in modules]
    for (_, module), layer in zip(modules, layers, strict=True):
        _install(module, layer)
    model.set_attn_implementation(registered)
    state = PatchState(
        family.model_type if family else "unknown", original, options, None if sidecar is None else sidecar.label
    )
    object.__setattr__(model, _STATE, state)
    add_refusals(model)
    handle = PatchHandle(model)
    logger.info("%s", handle.describe())
    return handle


def unpatch(model: PreTrainedModel) -> None:
    """Undo :func:`patch`: outputs, attributes and ``state_dict`` are what they were.

    What was set since then stays: an attention implementation that the caller chose while the model was patched, and
    projections that were replaced.

    Raises:
        PatchError: the model is not patched.
    """
    model = unwrapped(model)
    state = _state_of(model)
    modules = [module for module in model.modules() if layer_of(module)]
    holder: Any = modules[0] if modules else model
    present = holder.config._attn_implementation
    for module in modules:
        _uninstall(module)
    if present.startswith(PREFIX):
        model.set_attn_implementation(state.original)
    else:
        logger.info("the attention implementation %r was set while the model was patched, and stays", present)
    remove_refusals(model)
    object.__delattr__(model, _STATE)


@contextlib.contextmanager
def patched(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Iterator[PatchHandle]:
    """:func:`patch` for the length of a ``with`` block, undone however the block ends."""
    handle = patch(model, *args, **kwargs)
    try:
        yield handle
    finally:
        if hasattr(model, _STATE):
            unpatch(model)


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of a model's MLA attention: those with transformers' seam ``expand_kv``.

    Raises:
        UnsupportedModelError: when there are none.
    """
    found = [(n, m) for n, m in model.named_modules() if hasattr(type(m), "expand_kv") and hasattr(m, "kv_b_proj")]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {kind!r}) has no MLA attention with transformers' expand_kv; "
            f"supported are: {', '.join(sorted(FAMILIES))}. Models with their own code must be loaded without "
            "trust_remote_code"
        )
    return found


def _check_unpatched(model: Any, modules: Sequence[tuple[str, nn.Module]]) -> None:
    if hasattr(model, _STATE):
        raise PatchError("this model is patched already: call mla_convert.unpatch(model) first")
    if any(layer_of(module) for _, module in modules):
        raise PatchError(
            "a part of this model, or a model that it is part of, is patched already: unpatch that one first"
        )
    if _text_config(modules[0][1])._attn_implementation.startswith(PREFIX):
        raise PatchError(
            "this model shares its config object with another model that is patched: build it from a copy, "
            "copy.deepcopy(config), or unpatch the other model first"
        )


def _options(model: Any, backend: str, prefill_threshold: int | str, cache: str) -> Options:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"patch takes a transformers model, found {type(model).__name__}")
    choose_backend(backend, model.device)
    whole = isinstance(prefill_threshold, int) and not isinstance(prefill_threshold, bool) and prefill_threshold >= 0
    if not whole and prefill_threshold != "auto":
        raise UsageError(f'prefill_threshold is "auto" or a number of tokens from 0, found {prefill_threshold!r}')
    if cache not in CACHES:
        raise UsageError(f"cache {cache!r} is not known; choose one of {', '.join(CACHES)}")
    return Options(backend, prefill_threshold, cache)


def _text_config(module: nn.Module) -> Any:
    return module.config


def _family_of(model: Any, modules: Sequence[nn.Module], *, allow_unknown: bool) -> Family | None:
    """The row of the table for a model's attention class; None for an unknown one that is allowed."""
    known = {family.attention_class: family for family in FAMILIES.values()}
    classes = {type(module).__name__ for module in modules}
    unknown = sorted(classes - set(known))
    if unknown and not allow_unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses {', '.join(unknown)}, which is not among the supported families "
            f"({', '.join(sorted(FAMILIES))}). It has the same seam: patch(model, allow_unknown=True) tries it, and "
            "mla-convert verify tells whether it holds"
        )
    if not getattr(modules[0].config, "is_causal", True):
        raise UnsupportedModelError("the config says is_causal=false; absorbed decode is for causal attention")
    if unknown:
        logger.warning("patching %s, which is not a known family: verify the result", ", ".join(unknown))
        return None
    return known[classes.pop()]


def _build(
    name: str, module: Any, family: Family | None, asked: Asked, options: Options, sidecar: Sidecar | None
) -> AbsorbedLayer:
    check_readable(f"{name}.kv_b_proj", module.kv_b_proj)
    if sidecar is not None:
        check_whole(f"{name}.kv_b_proj", module.kv_b_proj, sidecar.label)
    stored = None if sidecar is None else sidecar.stored(name, module, asked)
    forms = _resolve(module, family, asked) if stored is None else stored.forms
    for part, form in ((query_name(module), forms.qk), ("o_proj", forms.vo)):
        if form == "fused":
            check_fusable(f"{name}.{part}", getattr(module, part))
    return AbsorbedLayer(module, name, forms, options, stored)


def _resolve(module: Any, family: Family | None, asked: Asked) -> Forms:
    """The form of each side, "auto" resolved; a side that may not be fused is refused, or factored under "auto"."""
    cheaper = choose_form(module_geometry(module))
    if not only_plain(module.kv_b_proj, getattr(module, query_name(module)), module.o_proj):
        cheaper = Forms("factored", "factored")
    return Forms(
        qk=_resolve_side("key", asked.qk, cheaper.qk, family is not None and family.fuse_qk),
        vo=_resolve_side("value", asked.vo, cheaper.vo, family is not None and family.fuse_vo),
    )


def _resolve_side(side: str, wanted: str, cheaper: Form, fusable: bool) -> Form:
    if wanted == "fused" and not fusable:
        raise UsageError(
            f"the {side} side of this model cannot be fused: something happens between its two projections, or the "
            "family is not known; use form='auto' or 'factored'"
        )
    if wanted == "auto":
        return cheaper if fusable else "factored"
    return "fused" if wanted == "fused" else "factored"


def _install(module: nn.Module, layer: AbsorbedLayer) -> None:
    module.add_module(ATTRIBUTE, layer)
    module.expand_kv = passed_through  # type: ignore[assignment]
    module.register_forward_pre_hook(begin_call, with_kwargs=True)
    module.register_forward_hook(end_call, always_call=True)
    if layer.forms.qk == "fused":
        name = query_name(module)
        layer.forwards[name] = FusedQuery(layer, getattr(module, name))
    if layer.forms.vo == "fused":
        layer.forwards["o_proj"] = FusedOutput(layer, module.o_proj)


def _uninstall(module: nn.Module) -> None:
    layer = layer_of(module)
    assert layer is not None
    for forward in layer.forwards.values():
        forward.remove()
    _remove_hook(module, begin_call)
    _remove_hook(module, end_call)
    del module.expand_kv
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


def _read_through(layers: Sequence[AbsorbedLayer]) -> str:
    forms = sorted({source.form for layer in layers for source in layer.sources} - {PLAIN.label})
    return "the model itself" + (f", through {', '.join(forms)}" if forms else "")


def _state_of(model: Any) -> PatchState:
    state = getattr(model, _STATE, None)
    if not isinstance(state, PatchState):
        raise PatchError("this model is not patched: call mla_convert.patch(model) first")
    return state


def _patched_layers(model: nn.Module) -> list[AbsorbedLayer]:
    return [layer for module in model.modules() if (layer := layer_of(module))]
