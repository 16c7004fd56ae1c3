"""Absorbed weights of one attention module in memory, and whether its own weights still are what they came from.

The weights live in a submodule as non-persistent buffers: they move with the model, and its
``state_dict`` stays the original's. W_UK and W_UV are kept contiguous per head, because PyTorch's CPU
products are up to ten times slower on strided slices of ``kv_b_proj``; W_UK is kept transposed, since
float16 products on a CPU need that.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from mla_convert.absorption import fuse_ov, fuse_qk, split_kv_b
from mla_convert.errors import PatchError, StaleWeightsError
from mla_convert.forms import Forms
from mla_convert.patches.coded import PLAIN as DEQUANTIZED
from mla_convert.patches.coded import CodedProjection, choose_product, describe_product
from mla_convert.patches.freshness import Owner, Source
from mla_convert.patches.modules import module_geometry, query_name, weight_dtype
from mla_convert.patches.sources import effective_weight, is_offloaded
from mla_convert.quantization import Quantized
from mla_convert.recipe import SIDES, Side
from mla_convert.wording import option


@dataclasses.dataclass
class Stored:
    """Absorbed weights of one layer as they are kept on disk: [H·N, C] or [H·(C+R), Q], and [H·V, C] or [D, H·C]."""

    forms: Forms
    qk: Tensor | Quantized
    vo: Tensor | Quantized


class AbsorbedWeights(nn.Module):
    """W_UK and W_UV, or their fused products, of one attention module.

    Buffers, in the module's own dtype (factored or fused, each side alone):

    - ``w_uk_t`` [H, C, N] or ``qk_absorbed`` [H·(C + R), Q];
    - ``w_uv`` [H, V, C] or ``ov_absorbed`` [D, H·C].

    ``dtype`` is theirs; ``forms`` and ``sources`` say what they are and what they were made from. A side that is
    multiplied as codes has a submodule instead, ``coded_qk`` or ``coded_vo``; ``products`` says how the weights of a
    quantized sidecar are used, by side, and is empty for others.
    """

    w_uk_t: Tensor
    w_uv: Tensor
    qk_absorbed: Tensor
    ov_absorbed: Tensor
    coded_qk: CodedProjection | None
    coded_vo: CodedProjection | None

    def __init__(
        self,
        owner: Owner,
        forms: Forms,
        stored: Stored | None = None,
        backend: str = "auto",
        codes: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = backend
        self.codes = codes
        self.geometry = module_geometry(owner)
        self.forms = forms
        self.from_folder = stored is not None
        self.coded_qk = self.coded_vo = None
        self.products: dict[str, str] = {}
        self.sources = [Source(name, owner) for name in self._source_names(owner)]
        if stored is None:
            self.derive(owner)
            self.release()
        else:
            self._take(stored, owner)

    def _source_names(self, owner: Owner) -> list[str]:
        names = ["kv_b_proj"]
        if self.forms.qk == "fused":
            names.append(query_name(owner))
        if self.forms.vo == "fused":
            names.append("o_proj")
        return names

    @property
    def offloaded(self) -> bool:
        """Whether the weights exist only during a call, as those that they come from."""
        return any(source.offloaded for source in self.sources)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @torch.no_grad()
    def derive(self, owner: Owner) -> None:
        """Make the absorbed weights from ``owner``'s present projections, and remember those; codes are given up."""
        self.coded_qk = self.coded_vo = None
        self.products = {}
        g, self.dtype = self.geometry, weight_dtype(owner)
        self.from_folder = False
        w_uk, w_uv = split_kv_b(effective_weight("kv_b_proj", owner.kv_b_proj), g)
        if self.forms.qk == "fused":
            name = query_name(owner)
            self._keep("qk_absorbed", fuse_qk(w_uk, effective_weight(name, getattr(owner, name)), g, self.dtype))
        else:
            self._keep("w_uk_t", w_uk.to(self.dtype).transpose(1, 2).contiguous())
        if self.forms.vo == "fused":
            self._keep("ov_absorbed", fuse_ov(w_uv, effective_weight("o_proj", owner.o_proj), g, self.dtype))
        else:
            self._keep("w_uv", w_uv.to(self.dtype).contiguous())
        for source in self.sources:
            source.remember(owner)

    def _take(self, stored: Stored, owner: Owner) -> None:
        """Use ``stored`` weights, in ``owner``'s dtype and on its device; codes as :func:`choose_product` says."""
        self.dtype = weight_dtype(owner)
        self._take_side("qk", stored.qk)
        self._take_side("vo", stored.vo)

    def _take_side(self, side: Side, stored: Tensor | Quantized) -> None:
        g = self.geometry
        numbers, coded = self._plain_or_coded(side, stored)
        setattr(self, f"coded_{side}", coded)
        if numbers is None:
            return
        if getattr(self.forms, side) == "fused":
            self._keep("qk_absorbed" if side == "qk" else "ov_absorbed", numbers)
        elif side == "qk":
            w_uk = numbers.view(g.num_heads, g.qk_nope_head_dim, g.kv_lora_rank)
            self._keep("w_uk_t", w_uk.transpose(1, 2).contiguous())
        else:
            self._keep("w_uv", numbers.reshape(g.num_heads, g.v_head_dim, g.kv_lora_rank).contiguous())

    def _plain_or_coded(self, side: Side, stored: Tensor | Quantized) -> tuple[Tensor | None, CodedProjection | None]:
        """One side's numbers in ``dtype``, or its codes; the other is None."""
        device = self.sources[0].device
        if isinstance(stored, Tensor):
            return stored.to(device=device, dtype=self.dtype), None
        factored = getattr(self.forms, side) == "factored"
        heads = self.geometry.num_heads if factored else 1
        over_rows = factored and side == "qk"
        shape = (stored.shape[0] // heads, stored.shape[1])
        kind = "fused" if not factored else "key" if over_rows else "value"
        product = choose_product(
            stored.scheme, shape, device, self.dtype, side=kind, backend=self.backend, codes=self.codes
        )
        self.products[side] = describe_product(stored.scheme, product)
        stored = Quantized(stored.codes.to(device), stored.scales.to(device), stored.scheme)
        if product == DEQUANTIZED:
            return stored.dequantize().to(self.dtype), None
        return None, CodedProjection(stored, heads, product, over_rows=over_rows, backend=self.backend)

    def follow(self, owner: Owner, *, look: bool) -> bool:
        """Derive the weights anew if ``owner``'s projections changed; whether they did.

        Raises:
            StaleWeightsError: when they changed in a way that cannot be followed.
        """
        changed = [source for source in self.sources if source.changed(owner, look=look)]
        if not changed:
            return False
        if self.products and all(source.only_moved(owner) for source in changed):
            self._move(owner)
            return False
        before = self.offloaded
        self._check_still_here(owner)
        try:
            self.derive(owner)
        except PatchError as error:
            raise StaleWeightsError(
                f"the weights changed after the model was patched: {error}; or unpatch the model"
            ) from error
        return not (before and self.offloaded)

    def _check_still_here(self, owner: Owner) -> None:
        """Refuse what offloaded projections cannot have unless it is kept: products, and weights from a folder."""
        if not any(is_offloaded(getattr(owner, source.name)) for source in self.sources):
            return
        if self.from_folder or "fused" in (self.forms.qk, self.forms.vo):
            raise StaleWeightsError(
                f"{self.sources[0].name} was offloaded after the model was patched: unpatch it, and patch it again "
                f"with {option('form', 'factored')} and without a folder of absorbed weights"
            )

    def _move(self, owner: Owner) -> None:
        """Keep the numbers of a quantized sidecar where the model was only cast or moved to another device."""
        for source in self.sources:
            source.remember(owner)
        self.dtype = weight_dtype(owner)
        for side in SIDES:
            coded: CodedProjection | None = getattr(self, f"coded_{side}")
            if coded is not None:
                self._take_side(side, coded.weight())

    def release(self) -> None:
        """Let go of absorbed weights whose sources accelerate keeps elsewhere; the next call makes them anew."""
        if self.offloaded:
            # Something must be left: accelerate moves the buffers that it found when it set its hooks.
            for name in list(self._buffers):
                self._keep(name, torch.empty(0, device=self.sources[0].device))

    def lift_query(self, q_nope: Tensor) -> Tensor:
        """``W_UKᵀ q`` per head: [B, H, S, N] to [B, S, H, C]."""
        if self.coded_qk is not None:
            lifted: Tensor = self.coded_qk(q_nope.transpose(1, 2))
            return lifted
        batch, heads, q_len, _ = q_nope.shape
        rows = q_nope.transpose(0, 1).reshape(heads, batch * q_len, -1)
        lifted = torch.bmm(rows, self.w_uk_t.transpose(1, 2))
        return lifted.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)

    def lift_output(self, out: Tensor) -> Tensor:
        """``W_UV o`` per head: [B, S, H, C] to [B, S, H, V]."""
        if self.coded_vo is not None:
            lifted: Tensor = self.coded_vo(out)
            return lifted
        batch, q_len, heads, width = out.shape
        rows = out.permute(2, 0, 1, 3).reshape(heads, batch * q_len, width)
        lifted = torch.bmm(rows, self.w_uv.transpose(1, 2))
        return lifted.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)

    def make_query(self, x: Tensor) -> Tensor:
        """The fused key side of [B, S, Q]: [B, S, H·(C + R)]."""
        if self.coded_qk is not None:
            return _by_codes(self.coded_qk, x)
        return nn.functional.linear(x, self.qk_absorbed)

    def make_output(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """The fused value side of [B, S, H·C]: [B, S, D], with ``o_proj``'s own bias."""
        if self.coded_vo is None:
            return nn.functional.linear(out, self.ov_absorbed, bias)
        product = _by_codes(self.coded_vo, out)
        return product if bias is None else product + bias


def _by_codes(coded: CodedProjection, x: Tensor) -> Tensor:
    """A fused weight's product, as that of a single head: [B, S, in] to [B, S, out]."""
    product: Tensor = coded(x.unsqueeze(2))
    return product.squeeze(2)
