"""What a patched attention module carries: its absorbed weights, its options, and the present call."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.forms import Forms
from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.dispatch import decode
from mla_convert.patches.cache import made_for
from mla_convert.patches.cache_formats import CacheFormat, parse_cache
from mla_convert.patches.call import Call, CallSlot
from mla_convert.patches.forms import bare_weight
from mla_convert.patches.masks import Visibility
from mla_convert.patches.sources import hooks_bypassed, stands_alone
from mla_convert.patches.weights import AbsorbedWeights, Stored

logger = logging.getLogger(__name__)

#: What a model says that was to keep the codes of a folder of absorbed weights, and has other weights now.
NO_CODES = (
    "absorbed weights were made anew from the model's own, in its dtype: the codes of the folder, which codes='keep' "
    "kept, are let go; to have codes of changed weights, convert the changed model and patch it with that folder"
)
#: Name of the submodule on each patched attention module.
ATTRIBUTE = "mla_absorbed"


@dataclasses.dataclass(frozen=True)
class Options:
    """How patched modules behave; see ``mla_convert.patch``."""

    backend: str = "auto"
    prefill_threshold: int | str = "auto"
    cache: str = "latent"
    codes: str = "auto"
    #: What this model's layers have said in the log, to say it once.
    said: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)
    #: The format in which plain caches become latent ones; None leaves them as they are.
    cache_format: CacheFormat | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_format", parse_cache(self.cache))

    def say_once(self, message: str) -> None:
        """Log a warning, once for each patched model."""
        if message not in self.said:
            self.said.add(message)
            logger.warning("%s", message)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the new tokens of a call see: by mask and length, by ``indices`` [B,S,K], and the sinks [H] beside it."""

    visible: Visibility
    indices: Tensor | None = None
    sinks: Tensor | None = None


class AbsorbedLayer(AbsorbedWeights):
    """The absorbed side of one attention module, as its submodule ``mla_absorbed``."""

    def __init__(self, owner: nn.Module, name: str, forms: Forms, options: Options, stored: Stored | None) -> None:
        super().__init__(owner, forms, stored, options.backend, options.codes)
        self.name = name
        self.options = options
        self.slot = CallSlot()
        #: Instance forwards of the fused form, by the name of the projection that they are set on.
        self.forwards: dict[str, Any] = {}
        self._told_of_hooks = False
        #: Layers of the model by its config, which a cache must have been made for.
        config: Any = owner.config
        self.model_layers = made_for(config)
        #: Names of the owner's forward arguments in order, for those that a caller gives by position.
        self.positional = tuple(inspect.signature(type(owner).forward).parameters)[1:]

    def prefers_absorbed(self, q_len: int, kv_len: int, chosen: int | None = None) -> bool:
        """Whether S new tokens over T cached ones cost less in latent space (multiplications per head).

        Absorbed: ``S·(C(N+V) + T(2C+R))``; expanded: ``T·C(N+V) + S·T(N+R+V)``. Where only ``chosen`` positions are
        attended to, they alone are read in latent space; expanding takes all T. One token is always absorbed, and a
        number given as ``prefill_threshold`` replaces the rule.
        """
        if isinstance(self.options.prefill_threshold, int):
            return q_len <= self.options.prefill_threshold
        if q_len == 1:
            return True
        g = self.geometry
        lift = g.kv_lora_rank * (g.qk_nope_head_dim + g.v_head_dim)
        read = kv_len if chosen is None else min(kv_len, chosen)
        absorbed = q_len * (lift + read * (2 * g.kv_lora_rank + g.qk_rope_head_dim))
        return absorbed < kv_len * lift + q_len * kv_len * (g.qk_head_dim + g.v_head_dim)

    def derive(self, owner: nn.Module) -> None:
        """As :meth:`AbsorbedWeights.derive`; says so where codes were to be kept."""
        coded = bool(self.products)
        super().derive(owner)
        if coded and self.codes == "keep":
            self.options.say_once(NO_CODES)

    def follow_weights(self, owner: nn.Module, *, decoding: bool) -> None:
        """Keep the absorbed weights true to ``owner``'s; on accelerators the sample is compared in prefill only."""
        look = not decoding or self.sources[0].device.type == "cpu"
        if self.follow(owner, look=look):
            logger.info("%s: the source weights changed; absorbed weights were made anew from them", self.name)
        for name, forward in self.forwards.items():  # only now: a forward that was put above is refused, not covered
            forward.follow(getattr(owner, name))

    def needs_projections(self, owner: nn.Module) -> bool:
        """Whether a projection must run itself in this call, for no one weight stands for it, or hooks wait there."""
        projections = [getattr(owner, source.name) for source in self.sources]
        if all(
            bare_weight(one) is not None and not (one._forward_hooks or one._forward_pre_hooks) for one in projections
        ):
            return False
        if any(map(stands_alone, projections)):
            return True
        hooked = [s.name for s in self.sources if hooks_bypassed(getattr(owner, s.name), runs=s.name in self.forwards)]
        if hooked and not self._told_of_hooks:
            self._told_of_hooks = True
            logger.warning("%s: %s has hooks; it runs expanded while it has them", self.name, ", ".join(hooked))
        return bool(hooked)

    def attend(self, query: Tensor, latent: Tensor, k_rope: Tensor, scale: float, call: Call, seen: Seen) -> Tensor:
        """Attention in latent space.

        Args:
            query: [B,H,S,N+R], rotated; of its content part only the factor in the first column is read where
                ``call.q_latent`` is there.
            latent, k_rope: [B,T,C] and [B,T,R], as cached: in codes where ``call.handover`` has their scales, and
                not read where it has pages.
            seen: what the new tokens may see.

        Returns:
            [B,S,H,V], or [B,S,H,C] where the value side is fused.
        """
        nope = self.geometry.qk_nope_head_dim
        if call.q_latent is None:
            q_latent = self.lift_query(query[..., :nope])
        else:
            # A factor for each token and head commutes with the projections, and is exact here.
            q_latent = call.q_latent * query[..., :1].transpose(1, 2)
        q_rope = query[..., nope:].transpose(1, 2)
        visible = seen.visible
        if visible.stop != latent.shape[1]:
            latent, k_rope = latent[:, : visible.stop], k_rope[:, : visible.stop]
        args = DecodeArguments(
            q_latent,
            q_rope,
            latent,
            k_rope,
            scale,
            visible.kv_lens,
            visible.mask,
            indices=seen.indices,
            sinks=seen.sinks,
        )
        if call.handover is not None:
            args = call.handover.complete(args)
        out, _ = decode(args, self.options.backend)
        return out if self.forms.vo == "fused" else self.lift_output(out)


def layer_of(module: nn.Module) -> AbsorbedLayer | None:
    """The absorbed side of an attention module; None where it is not patched."""
    layer = module._modules.get(ATTRIBUTE)
    return layer if isinstance(layer, AbsorbedLayer) else None


def wants_gradients(module: nn.Module, hidden: Tensor) -> bool:
    """Whether this call is part of a graph: absorbed weights carry no gradients, so it must run expanded."""
    if not torch.is_grad_enabled():
        return False
    return hidden.requires_grad or any(p.requires_grad for p in module.parameters())
