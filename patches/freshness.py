"""Whether the projections that absorbed weights were made from still are what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.errors import PatchError, StaleWeightsError
from mla_convert.patches.forms import PLAIN, Projection, bare_weight
from mla_convert.patches.sources import at_hand, beside_the_weight, is_offloaded, reader_of

#: Elements compared to notice edits that leave no other trace.
SAMPLED = 64

#: An attention module of transformers: its attributes differ by family, and are looked up when used.
Owner = Any


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
        if found := beside_the_weight(self.name, linear):
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
