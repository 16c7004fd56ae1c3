"""Absorbed weights of one attention module in memory, and whether its own weights still are what they came from.

The weights live in a submodule as non-persistent buffers: they move with the model, and its
``state_dict`` stays the original's. W_UK and W_UV are kept contiguous per head, because PyTorch's CPU
products are up to ten times slower on strided slices of ``kv_b_proj``; W_UK is kept transposed, since
float16 products on a CPU need that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.absorption import Forms, fuse_ov, fuse_qk, split_kv_b
from mla_convert.errors import PatchError, StaleWeightsError
from mla_convert.geometry import MLAGeometry

#: Elements compared to notice edits that leave no other trace.
SAMPLED = 64


#: An attention module of transformers: its attributes differ by family, and are looked up when used.
Owner = Any


def query_name(module: Owner) -> str:
    """Which submodule makes the query's heads: ``q_b_proj``, or ``q_proj`` without a query rank."""
    return "q_proj" if getattr(module, "q_lora_rank", None) is None else "q_b_proj"


def module_geometry(module: Owner) -> MLAGeometry:
    """Dimensions of an attention module, from the module itself; the number of heads from its local weight."""
    n, v = int(module.qk_nope_head_dim), int(module.v_head_dim)
    rows = module.kv_b_proj.weight.shape[0]
    q_rank = getattr(module, "q_lora_rank", None)
    return MLAGeometry(
        hidden_size=int(module.o_proj.weight.shape[0]),
        num_heads=rows // (n + v),
        kv_lora_rank=int(module.kv_lora_rank),
        qk_nope_head_dim=n,
        qk_rope_head_dim=int(module.qk_rope_head_dim),
        v_head_dim=v,
        q_lora_rank=None if q_rank is None else int(q_rank),
        scale=float(module.scaling),
    )


class Source:
    """One projection that absorbed weights come from, as it was when they were made."""

    def __init__(self, name: str, linear: nn.Linear) -> None:
        self.name = name
        self.linear = linear
        self.remember()

    def remember(self) -> None:
        """Take the projection's present weight as the one in use."""
        weight = self.linear.weight
        self.weight = weight
        self.pointer = weight.data_ptr()
        self.version = _version(weight)
        self.sample = _sample(weight).clone()

    def changed(self, owner: Owner, *, look: bool) -> bool:
        """Whether ``owner``'s projection of this name holds other numbers now; ``look`` compares the sample too.

        Raises:
            StaleWeightsError: when the projection itself was replaced (by an adapter, say).
        """
        linear = getattr(owner, self.name)
        if linear is not self.linear:
            raise StaleWeightsError(
                f"{self.name} was replaced by a {type(linear).__name__} after the model was patched; "
                "unpatch the model, change it, and patch it again"
            )
        weight = self.linear.weight
        if weight is not self.weight or weight.data_ptr() != self.pointer or _version(weight) != self.version:
            return True
        return look and not torch.equal(_sample(weight), self.sample)


def _version(weight: Tensor) -> int | None:
    """The counter of in-place changes; parameters made in inference mode have none."""
    return None if weight.is_inference() else weight._version


def _sample(weight: Tensor) -> Tensor:
    """A view of elements spread over the whole weight."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)]


@dataclasses.dataclass
class Stored:
    """Absorbed weights of one layer as they are kept on disk: [H·N, C] or [H·(C+R), Q], and [H·V, C] or [D, H·C]."""

    forms: Forms
    qk: Tensor
    vo: Tensor


class AbsorbedWeights(nn.Module):
    """W_UK and W_UV, or their fused products, of one attention module.

    Buffers, in the module's own dtype (factored or fused, each side alone):

    - ``w_uk_t`` [H, C, N] or ``qk_absorbed`` [H·(C + R), Q];
    - ``w_uv`` [H, V, C] or ``ov_absorbed`` [D, H·C].
    """

    w_uk_t: Tensor
    w_uv: Tensor
    qk_absorbed: Tensor
    ov_absorbed: Tensor

    def __init__(self, owner: Owner, forms: Forms, stored: Stored | None = None) -> None:
        super().__init__()
        self.geometry = module_geometry(owner)
        self.forms = forms
        self.sources = [Source(name, getattr(owner, name)) for name in self._source_names(owner)]
        if stored is None:
            self.derive(owner)
        else:
            self._take(stored, owner)

    def _source_names(self, owner: Owner) -> list[str]:
        names = ["kv_b_proj"]
        if self.forms.qk == "fused":
            names.append(query_name(owner))
        if self.forms.vo == "fused":
            names.append("o_proj")
        return names

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @torch.no_grad()
    def derive(self, owner: Owner) -> None:
        """Make the absorbed weights from ``owner``'s present projections, and remember those."""
        g = self.geometry
        kv_b = owner.kv_b_proj.weight.detach()
        w_uk, w_uv = split_kv_b(kv_b, g)
        if self.forms.qk == "fused":
            query = getattr(owner, query_name(owner)).weight.detach()
            self._keep("qk_absorbed", fuse_qk(w_uk, query, g, kv_b.dtype))
        else:
            self._keep("w_uk_t", w_uk.transpose(1, 2).contiguous())
        if self.forms.vo == "fused":
            self._keep("ov_absorbed", fuse_ov(w_uv, owner.o_proj.weight.detach(), g, kv_b.dtype))
        else:
            self._keep("w_uv", w_uv.contiguous())
        for source in self.sources:
            source.remember()

    def _take(self, stored: Stored, owner: Owner) -> None:
        """Use ``stored`` weights, in ``owner``'s dtype and on its device."""
        g = self.geometry
        like = owner.kv_b_proj.weight
        qk, vo = (t.to(device=like.device, dtype=like.dtype) for t in (stored.qk, stored.vo))
        if self.forms.qk == "fused":
            self._keep("qk_absorbed", qk)
        else:
            w_uk = qk.view(g.num_heads, g.qk_nope_head_dim, g.kv_lora_rank)
            self._keep("w_uk_t", w_uk.transpose(1, 2).contiguous())
        if self.forms.vo == "fused":
            self._keep("ov_absorbed", vo)
        else:
            self._keep("w_uv", vo.reshape(g.num_heads, g.v_head_dim, g.kv_lora_rank).contiguous())

    def follow(self, owner: Owner, *, look: bool) -> bool:
        """Derive the weights anew if ``owner``'s projections changed; whether they did.

        Raises:
            StaleWeightsError: when they changed in a way that cannot be followed.
        """
        if not any([source.changed(owner, look=look) for source in self.sources]):
            return False
        self.derive(owner)
        return True

    def lift_query(self, q_nope: Tensor) -> Tensor:
        """``W_UKᵀ q`` per head: [B, H, S, N] to [B, S, H, C]."""
        batch, heads, q_len, _ = q_nope.shape
        rows = q_nope.transpose(0, 1).reshape(heads, batch * q_len, -1)
        lifted = torch.bmm(rows, self.w_uk_t.transpose(1, 2))
        return lifted.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)

    def lift_output(self, out: Tensor) -> Tensor:
        """``W_UV o`` per head: [B, S, H, C] to [B, S, H, V]."""
        batch, q_len, heads, width = out.shape
        rows = out.permute(2, 0, 1, 3).reshape(heads, batch * q_len, width)
        lifted = torch.bmm(rows, self.w_uv.transpose(1, 2))
        return lifted.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)


def check_projection(where: str, linear: Any) -> None:
    """Refuse a projection whose weight cannot be read as it is.

    Raises:
        PatchError: naming the module, what it is, and what to do.
    """
    if type(linear) is not nn.Linear:
        raise PatchError(
            f"{where} is a {type(linear).__module__}.{type(linear).__name__}; supported are plain torch.nn.Linear "
            "weights: load the model dequantized (mla_convert.load does), and merge or unload adapters first"
        )
    weight = linear.weight
    if weight.is_meta:
        raise PatchError(f"{where}.weight is on the meta device: load the model's weights before patching it")
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise PatchError(f"{where}.weight is {weight.dtype}; supported are float16, bfloat16, float32 and float64")
