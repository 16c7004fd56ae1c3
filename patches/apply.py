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

from mla_convert.errors import PatchError
from mla_convert.kernels.dispatch import describe_backend
from mla_convert.patches.adapters import unwrapped
from mla_convert.patches.attention import registered_name
from mla_convert.patches.cache_rows import code_dtype
from mla_convert.patches.description import PatchDescription, products_of, read_through
from mla_convert.patches.installing import install, uninstall
from mla_convert.patches.layer import AbsorbedLayer, Options, layer_of
from mla_convert.patches.originals import PREFIX
from mla_convert.patches.preparing import build_layer, parse_options
from mla_convert.patches.recognition import attention_modules, attention_setting, family_of
from mla_convert.patches.refusals import add_refusals, remove_refusals
from mla_convert.patches.sidecar import Asked, Sidecar, check_kept
from mla_convert.patches.versions import check_sparse, check_transformers
from mla_convert.patches.warming import warm_model
from mla_convert.recipe import parse_forms

logger = logging.getLogger(__name__)

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


class PatchHandle:
    """A patched model: what runs in it, and the way back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"<PatchHandle {self.describe()}>" if hasattr(self.model, _STATE) else "<PatchHandle, unpatched>"

    def describe(self) -> PatchDescription:
        """Family, form of each side, backend, threshold, cache and the layers patched."""
        state, layers = _state_of(self.model), _patched_layers(self.model)
        device = layers[0].sources[0].device
        return PatchDescription(
            family=state.family,
            qk_form="/".join(sorted({layer.forms.qk for layer in layers})),
            vo_form="/".join(sorted({layer.forms.vo for layer in layers})),
            weights_from=state.sidecar or read_through(layers),
            products=products_of(layers),
            backend=describe_backend(
                state.options.backend, device, code_dtype(state.options.cache_format), layers[0].dtype
            ),
            prefill_threshold=state.options.prefill_threshold,
            cache=state.options.cache,
            original_attention=state.original,
            layers=tuple(layer.name for layer in layers),
        )

    def refresh(self) -> None:
        """Make the absorbed weights anew from the model's own; needed after edits to a model that runs compiled.

        A quantized folder's codes are given up, as they are where a changed weight is noticed.
        """
        _state_of(self.model)
        for module in self.model.modules():
            if layer := layer_of(module):
                layer.derive(module)

    def warmup(self) -> None:
        """Compile ahead what the first steps would otherwise compile; the PyTorch backend has nothing to compile.

        The kernel for the cache that ``patch`` was asked for, and products with a quantized sidecar's weights. A
        ``PagedLatentCache`` has a kernel of its own for each page size, which its first step compiles.
        """
        _state_of(self.model)
        logger.info("warmed up %d kinds of call", warm_model(self.model))

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
    codes: str = "auto",
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
        cache: "latent" gives generation a ``LatentCache``; "latent:FORMAT" one in that format ("latent:int8",
            "latent:int4:32", "latent:fp8"), which takes less memory and is not exact; "dynamic" leaves caches alone.
        codes: for a quantized folder: "auto" multiplies by the codes where that is fastest and else dequantizes them
            once; "keep" leaves them in memory whatever that costs, dequantized piece by piece at each call where no
            product takes them. Changed weights give codes up, as ever: absorbed weights are made anew from them.
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
    options = parse_options(model, backend, prefill_threshold, cache, codes)
    modules = attention_modules(model)
    _check_unpatched(model, modules)
    parts = [module for _, module in modules]
    check_sparse(parts)
    family = family_of(model, parts, allow_unknown=allow_unknown)
    sidecar = None if absorbed is None else Sidecar(absorbed)
    check_kept(codes, sidecar)
    original = _config_of(modules)._attn_implementation
    registered = registered_name(original)
    setting = attention_setting(model, parts, registered)
    layers = [build_layer(name, module, family, asked, options, sidecar) for name, module in modules]
    state = PatchState(
        family.model_type if family else "unknown", original, options, None if sidecar is None else sidecar.label
    )
    try:
        for module, layer in zip(parts, layers, strict=True):
            install(module, layer)
        model.set_attn_implementation(setting)
        object.__setattr__(model, _STATE, state)
        add_refusals(model)
        handle = PatchHandle(model)
        logger.info("%s", handle.describe())
    except BaseException:
        _take_back(model, parts, original)
        raise
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
    if not present.startswith(PREFIX):
        logger.info("the attention implementation %r was set while the model was patched, and stays", present)
    _take_back(model, modules, state.original)


@contextlib.contextmanager
def patched(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Iterator[PatchHandle]:
    """:func:`patch` for the length of a ``with`` block, undone however the block ends."""
    handle = patch(model, *args, **kwargs)
    try:
        yield handle
    finally:
        if hasattr(model, _STATE):
            unpatch(model)


def _check_unpatched(model: Any, modules: Sequence[tuple[str, nn.Module]]) -> None:
    if hasattr(model, _STATE):
        raise PatchError("this model is patched already: call mla_convert.unpatch(model) first")
    if any(layer_of(module) for _, module in modules):
        raise PatchError(
            "a part of this model, or a model that it is part of, is patched already: unpatch that one first"
        )
    if _config_of(modules)._attn_implementation.startswith(PREFIX):
        raise PatchError(
            "this model shares its config object with another model that is patched: build it from a copy, "
            "copy.deepcopy(config), or unpatch the other model first"
        )


def _config_of(modules: Sequence[tuple[str, nn.Module]]) -> Any:
    return modules[0][1].config


def _take_back(model: Any, modules: Sequence[nn.Module], original: str) -> None:
    """Remove all of a patch, or of the part of it that was made when something went wrong."""
    for module in modules:
        uninstall(module)
    holder: Any = modules[0] if modules else model
    if holder.config._attn_implementation.startswith(PREFIX):
        model.set_attn_implementation(attention_setting(model, modules, original))
    remove_refusals(model)
    vars(model).pop(_STATE, None)


def _state_of(model: Any) -> PatchState:
    state = getattr(model, _STATE, None)
    if not isinstance(state, PatchState):
        raise PatchError("this model is not patched: call mla_convert.patch(model) first")
    return state


def _patched_layers(model: nn.Module) -> list[AbsorbedLayer]:
    return [layer for module in model.modules() if (layer := layer_of(module))]
