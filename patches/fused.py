"""The projections of the fused form, as forwards of two module instances.

No submodule is replaced: names, types and adapter targets stay. In an absorbed call the query
projection multiplies by ``qk_absorbed`` and gives the attention module only what it still has to
rotate; the lifted query waits in the call. The output projection multiplies by ``ov_absorbed``. In
every other call both are what they were.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_convert.patches.forms import Projection
from mla_convert.patches.layer import AbsorbedLayer
from mla_convert.patches.sources import OwnForward


class _InstanceForward(OwnForward):
    """A forward set on one projection; ``inner`` is what stood there before (None: the class's own)."""

    def __init__(self, layer: AbsorbedLayer, linear: Projection) -> None:
        self.layer = layer
        self.install(linear)

    def install(self, linear: Projection) -> None:
        """Set this object as the forward of ``linear``."""
        self.linear = linear
        self.inner: Any = linear.__dict__.get("forward")
        linear.__dict__["forward"] = self

    def remove(self) -> None:
        """Put back what stood there, also from below a hook that accelerate has put above since."""
        attributes = self.linear.__dict__
        if attributes.get("_old_forward") is self:
            attributes["_old_forward"] = self.inner or type(self.linear).forward.__get__(self.linear)
        if attributes.get("forward") is not self:
            return
        del attributes["forward"]
        if self.inner is not None:
            attributes["forward"] = self.inner

    def follow(self, linear: Projection) -> None:
        """Move to ``linear``, which adapters may have put around the projection or uncovered; come back if removed."""
        attributes = self.linear.__dict__
        present = attributes.get("forward") is self or attributes.get("_old_forward") is self
        if linear is self.linear and present:
            return
        if present:
            self.remove()
        self.install(linear)

    def original(self, *args: Any, **kwargs: Any) -> Tensor:
        """The projection as it was."""
        inner = self.inner or type(self.linear).forward.__get__(self.linear)
        out: Tensor = inner(*args, **kwargs)
        return out


class FusedQuery(_InstanceForward):
    """``q_b_proj`` or ``q_proj`` with the fused key side: [B,S,Q] to [B,S,H·(N+R)]."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In an absorbed call the content is a one and zeros: what the module multiplies it by is read from the one."""
        call = self.layer.slot.get()
        if call is None or not call.absorbed:
            return self.original(x, *args, **kwargs)
        g = self.layer.geometry
        heads = self.layer.make_query(x).view(*x.shape[:-1], -1, g.latent_width)
        call.q_latent = heads[..., : g.kv_lora_rank]
        query = heads.new_zeros(*heads.shape[:-1], g.qk_head_dim)
        query[..., 0] = 1
        query[..., g.qk_nope_head_dim :] = heads[..., g.kv_lora_rank :]
        return query.flatten(-2)


class FusedOutput(_InstanceForward):
    """``o_proj`` with the fused value side: [B,S,H·C] in an absorbed call, [B,S,H·V] elsewhere, to [B,S,D]."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The call decides, not the width: C may equal V."""
        call = self.layer.slot.get()
        if call is None or not call.absorbed:
            return self.original(x, *args, **kwargs)
        return self.layer.make_output(x, self.linear.bias)
