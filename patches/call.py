"""What the parts of one attention call tell each other: the decision, and the fused query.

The forward pre-hook decides once; the projections and the attention function obey; a forward hook
that is always called clears. Calls of several threads do not see each other.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.tracing import being_traced


@dataclasses.dataclass
class Handover:
    """What a cache layer hands the absorbed path beside keys and values: fields of :class:`DecodeArguments`."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def complete(self, args: DecodeArguments) -> DecodeArguments:
        """``args`` with what was handed over in it; scales of a history that was cut are cut too."""
        fields = dict(self.fields)
        if "block_table" not in fields and fields:
            fields["latent_scale"] = fields["latent_scale"][:, : args.latent.shape[1]]
        elif fields and args.mask is not None:
            raise UsageError(
                "a paged cache holds no padding and knows the length of each sequence: call the model without an "
                "attention_mask, padded tokens at the left and their number given to the cache"
            )
        return dataclasses.replace(args, **fields)


@dataclasses.dataclass
class Call:
    """One call of an attention module.

    Attributes:
        absorbed: whether attention runs in latent space.
        capacity: whether the cache hands out its capacity rather than its content (``StaticCache``).
        q_latent: [B,S,H,C], where the query projection is fused and has run.
        selection: [B,S,K] positions that alone say what is visible, where the module makes its mask of them.
        handover: filled by the cache layer, where it stores codes or pages.
        stored: that cache layer.
    """

    absorbed: bool
    capacity: bool = False
    q_latent: torch.Tensor | None = None
    selection: torch.Tensor | None = None
    handover: Handover | None = None
    stored: Any = None

    def close(self) -> None:
        """From here on the cache layer gives everybody numbers again."""
        if self.stored is not None:
            self.stored.handover = None

    @property
    def expands_capacity(self) -> bool:
        """Whether all that the cache can hold would be expanded, filled or not."""
        return self.capacity and not self.absorbed


class CallSlot:
    """The present call of one module in this thread; copies and pickles are empty."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._traced: Call | None = None

    def __reduce__(self) -> tuple[type[CallSlot], tuple[()]]:
        return CallSlot, ()

    def set(self, call: Call | None) -> None:
        """Begin (or, with None, end) a call."""
        # Compiled code runs one trace at a time, and cannot trace thread-local state.
        if being_traced():
            self._traced = call
        else:
            self._local.call = call

    def get(self) -> Call | None:
        """The call under way, None outside one."""
        if being_traced():
            return self._traced
        return getattr(self._local, "call", None)
