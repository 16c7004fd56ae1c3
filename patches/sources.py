"""The projections that absorbed weights come from: what they amount to, and whether they still are what they were."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import FormatError, PatchError, StaleWeightsError, UsageError
from mla_convert.formats import plain
from mla_convert.patches.adapters import is_lora, lora_reader
from mla_convert.patches.forms import LINEAR, PLAIN, PLAIN_TENSORS, Projection, Reader, bare_weight, kinds
from mla_convert.patches.quantized import QUANTIZED

#: Elements compared to notice edits that leave no other trace.
SAMPLED = 64

#: An attention module of transformers: its attributes differ by family, and are looked up when used.
Owner = Any


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
    if found := _beside_the_weight(where, linear):
        raise PatchError(f"{where} has {found}")


def _beside_the_weight(name: str, linear: Projection) -> str | None:
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
        raise UsageError(f"{where} cannot be fused: {reason}; use form='auto' or 'factored'")


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


@dataclasses.dataclass
class _Part:
    """One tensor, as it was."""

    tensor: Tensor
    pointer: int
    version: int | None
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        return cls(tensor, _pointer(tensor), _version(tensor), _sample(tensor).clone())

    def changed(self, now: Tensor, *, look: bool) -> bool:
        if now is not self.tensor or _pointer(now) != self.pointer or _version(now) != self.version:
            return True
        return look and not torch.equal(_sample(now), self.sample)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"unchanged": not self.changed(self.tensor, look=False)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled part is as its tensor, which was copied with it, unless that had changed before."""
        unchanged = state.pop("unchanged")
        self.__dict__.update(state)
        if unchanged:
            self.pointer, self.version = _pointer(self.tensor), _version(self.tensor)

    def moved_to(self, now: Tensor) -> bool:
        """Whether ``now``, of another dtype or on another device, has the remembered sample, as its dtype rounds it."""
        sample = _sample(now)
        if (sample.dtype, sample.device) == (self.sample.dtype, self.sample.device):
            return False
        narrow = min(sample.dtype, self.sample.dtype, key=lambda dtype: dtype.itemsize)
        return torch.equal(sample.to(self.sample.device, narrow), self.sample.to(narrow))


class Source:
    """One projection that absorbed weights come from, as it was when they were made.

    Attributes:
        form: the label of its reader.
        device: where its weight is computed with.
        offloaded: whether accelerate keeps it elsewhere; it is then read anew for each call, and never stale.
    """

    def __init__(self, name: str, owner: Owner) -> None:
        self.name = name
        self.remember(owner)

    def remember(self, owner: Owner) -> None:
        """Take the projection's present weight as the one in use."""
        self.linear: Projection = getattr(owner, self.name)
        reader = reader_of(self.name, self.linear)
        self.form = reader.label
        self.offloaded = is_offloaded(self.linear)
        with at_hand(self.linear):
            self.state: Hashable = reader.state(self.linear)
            parts = reader.parts(self.linear)
            self.device = next(iter(parts.values())).device
            self.parts = {} if self.offloaded else {name: _Part.of(part) for name, part in parts.items()}

    def changed(self, owner: Owner, *, look: bool) -> bool:
        """Whether ``owner``'s projection of this name holds other numbers now; ``look`` compares the samples too.

        Raises:
            StaleWeightsError: when the projection is of a form now that cannot be read.
        """
        linear = getattr(owner, self.name)
        if found := _beside_the_weight(self.name, linear):
            raise StaleWeightsError(f"since the model was patched, {self.name} has {found}")
        bare = bare_weight(linear) if linear is self.linear and self.form == PLAIN.label else None
        if bare is not None and not self.offloaded:
            return self.parts["weight"].changed(bare, look=look)
        try:
            reader = reader_of(self.name, linear)
        except PatchError as error:
            raise StaleWeightsError(
                f"{self.name} was replaced by a {type(linear).__name__} after the model was patched; "
                f"unpatch the model, change it, and patch it again ({error})"
            ) from error
        if linear is not self.linear or is_offloaded(linear) or reader.state(linear) != self.state:
            return True
        parts = reader.parts(linear)
        return parts.keys() != self.parts.keys() or any(
            [self.parts[name].changed(part, look=look) for name, part in parts.items()]
        )

    def only_moved(self, owner: Owner) -> bool:
        """Whether the projection holds the remembered numbers, cast or on another device; judged by the samples."""
        linear = getattr(owner, self.name)
        if linear is not self.linear or is_offloaded(linear):
            return False
        reader = reader_of(self.name, linear)
        parts = reader.parts(linear)
        if parts.keys() != self.parts.keys() or reader.state(linear) != self.state:
            return False
        return all(self.parts[name].moved_to(part) for name, part in parts.items())


def _made_of_tensors(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of its own; those that it is made of are parts as well."""
    return type(tensor) is not nn.Parameter and hasattr(tensor, "__tensor_flatten__")


def _pointer(tensor: Tensor) -> int:
    return 0 if _made_of_tensors(tensor) else tensor.data_ptr()


def _version(tensor: Tensor) -> int | None:
    """The counter of in-place changes; parameters made in inference mode have none."""
    return None if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """A view of elements spread over the whole tensor, as bytes where it holds codes."""
    if _made_of_tensors(tensor):
        return torch.empty(0)
    flat = tensor.detach()
    step = max(1, flat.numel() // SAMPLED)
    if flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    if flat.is_contiguous():  # one view instead of two, in every step
        return flat.as_strided((-(-flat.numel() // step),), (step,))
    return flat.reshape(-1)[::step]
