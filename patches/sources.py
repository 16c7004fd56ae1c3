"""The projections that absorbed weights come from: what they amount to, and what can be read of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import FormatError, PatchError, UsageError
from mla_convert.formats import plain
from mla_convert.patches.adapters import is_lora, lora_reader
from mla_convert.patches.forms import LINEAR, PLAIN, PLAIN_TENSORS, Projection, Reader, kinds
from mla_convert.patches.quantized import QUANTIZED
from mla_convert.wording import option


def reader_of(where: str, linear: Projection) -> Reader:
    """The row of :data:`READERS` for a projection.

    Raises:
        PatchError: naming the module, what it is, and what to do.
    """
    for reader in READERS:
        if reader.holds(linear):
            return reader
    weight = getattr(linear, "weight", None)
    if kinds(linear)[0] == LINEAR and isinstance(weight, Tensor):
        what = plain(weight.dtype) if kinds(weight)[0] in PLAIN_TENSORS else f"a {kinds(weight)[0]}"
        raise PatchError(f"{where}.weight is {what}; supported are {', '.join(map(plain, FLOAT_DTYPES))}")
    raise PatchError(
        f"{where} is a {kinds(linear)[0]}; supported are plain torch.nn.Linear weights, and "
        f"{', '.join(reader.label for reader in READERS[1:])}: load the model dequantized (mla_convert.load does), and "
        "merge or unload adapters first"
    )


#: Attributes that tell who set a projection's forward: accelerate, transformers' parallel plans, compressed-tensors.
_KNOWN_FORWARDS = ("_hf_hook", "_is_hooked", "quantization_scheme")
READERS: tuple[Reader, ...] = (PLAIN, lora_reader(reader_of), *QUANTIZED)


def shape_of(where: str, linear: Projection) -> tuple[int, int]:
    """Shape [out, in] of a projection's effective weight (of this process's shard of it)."""
    return reader_of(where, linear).shape(linear)


@torch.no_grad()
def effective_weight(where: str, linear: Projection, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [out, in] that a projection's forward amounts to, in ``dtype`` or as wide as it was formed.

    Raises:
        PatchError: where no one weight stands for the projection, or its form is not known.
    """
    with at_hand(linear):
        reader = reader_of(where, linear)
        try:
            weight = reader.read(linear)
        except (PatchError, FormatError) as error:
            raise PatchError(f"{where}: {error}") from error
    if weight.is_meta:
        raise PatchError(f"{where}.weight is on the meta device: load the model's weights before patching it")
    return weight if dtype is None else weight.to(dtype)


class OwnForward:
    """A forward that this package sets on a projection."""


def check_readable(where: str, linear: Projection) -> None:
    """Refuse a projection whose forward is not its effective weight times the input, or whose weight is not there.

    Raises:
        PatchError: naming the module, what it is, and what to do.
    """
    reader_of(where, linear)
    if found := beside_the_weight(where, linear):
        raise PatchError(f"{where} has {found}")


def beside_the_weight(name: str, linear: Projection) -> str | None:
    """What a projection does besides multiplying by its weight, that no absorbed step would do, and what to do."""
    for module in (linear, linear.get_base_layer()) if is_lora(linear) else (linear,):
        forward = module.__dict__.get("forward")
        # accelerate leaves the class's own on the instance when it takes its hooks off.
        if forward is None or isinstance(forward, OwnForward) or forward == type(module).forward.__get__(module):
            continue
        if any(hasattr(module, mark) for mark in _KNOWN_FORWARDS):
            continue
        return (
            "a forward of its own, set on the instance, that an absorbed step would not call: remove it "
            "(del module.forward), or run the model unpatched"
        )
    # The output projection adds its own, whichever way it is multiplied by.
    if getattr(linear, "bias", None) is not None and name.rpartition(".")[2] != "o_proj":
        return "a bias, which an absorbed step would leave out: run the model unpatched"
    return None


def check_fusable(where: str, linear: Projection) -> None:
    """Refuse to fuse what a projection does with its weight with what comes before or after it.

    Raises:
        PatchError, UsageError: naming the module and what to do.
    """
    check_readable(where, linear)
    reason = None
    if is_offloaded(linear):
        reason = "its weight is offloaded, so that the product would be made anew for each token"
    elif is_sharded(linear):
        reason = "it is sharded over processes, and talks to the others itself"
    if reason:
        raise UsageError(f"{where} cannot be fused: {reason}; use {option('form', 'auto')} or 'factored'")


def check_whole(where: str, linear: Projection, folder: str) -> None:
    """Refuse to use absorbed weights of a folder for a projection that is not here, or only in part.

    Raises:
        UsageError: naming the module and what to do.
    """
    found = "offloaded" if is_offloaded(linear) else "sharded over processes" if is_sharded(linear) else None
    if found:
        raise UsageError(
            f"{where} is {found}, and the weights in {folder} are for whole models in memory: leave the folder out, "
            "and absorbed weights are made from the model's own"
        )


def only_plain(*linears: Projection) -> bool:
    """Whether all are plain weights at hand: "auto" fuses nothing else, which codes and adapters would not gain by."""
    return all(PLAIN.holds(linear) and not is_offloaded(linear) for linear in linears)


def stands_alone(linear: Projection) -> bool:
    """Whether, as things stand, no one weight amounts to a projection's forward (dropout in an adapter)."""
    reader = next((reader for reader in READERS if reader.holds(linear)), None)
    return reader is not None and reader.varies(linear)


def hooks_bypassed(linear: Projection, *, runs: bool) -> bool:
    """Whether a projection has forward hooks that an absorbed call does not run.

    Args:
        runs: the projection itself is called, with another forward; then only hooks inside it are bypassed, and PEFT's,
            which choose an adapter for each sequence.
    """
    modules = list(linear.modules())
    inner = modules[1:] if runs and not is_lora(linear) else modules
    return any(module._forward_hooks or module._forward_pre_hooks for module in inner)


def is_sharded(linear: Projection) -> bool:
    """Whether a projection's weight is spread over processes."""
    return "torch.distributed.tensor.DTensor" in kinds(getattr(linear, "weight", None))


def is_offloaded(linear: Projection) -> bool:
    """Whether accelerate brings a projection's weight from elsewhere for each call, and takes it away again."""
    return any(_hooks_offload(module) for module in linear.modules())


def _hooks_offload(module: nn.Module) -> bool:
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        return False
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))


@contextlib.contextmanager
def at_hand(linear: Projection) -> Iterator[None]:
    """For the length of a ``with`` block, weights that accelerate has offloaded are where they are computed with."""
    offloaded: list[Any] = [module for module in linear.modules() if _hooks_offload(module)]
    try:
        for module in offloaded:
            module._hf_hook.pre_forward(module)
        yield
    finally:
        for module in offloaded:
            module._hf_hook.post_forward(module, None)
