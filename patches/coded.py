"""One side's quantized weight in memory, and the product with it as it is.

Which product runs is decided by where the weight is and what it is multiplied with (:func:`choose_product`):

- on CUDA and ROCm, the Triton kernel of :mod:`mla_convert.kernels.projection`, which dequantizes inside the product;
- on a CPU in bfloat16, PyTorch's packed products for int8 rows and int4 groups, where :data:`CPU_PRODUCTS` says that
  they were measured faster than the plain product;
- elsewhere the weight is dequantized once, and is a plain one from then on: PyTorch has no packed product for FP8,
  those in float32 and float16 are slower than plain ones, and int4 groups of the key side lie along the axis that is
  not summed.

``codes="keep"`` chooses bytes over speed: codes stay in memory whatever that costs. Every packed product that there is
is used then, measured faster or not, and elsewhere a weight is dequantized anew for each call, piece by piece
(:mod:`mla_convert.patches.unpacking`).

The codes are integer buffers and the scales' float32 bits an int32 buffer, so that casting the model changes neither.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_convert.errors import UsageError
from mla_convert.kernels.dispatch import choose_backend
from mla_convert.kernels.packed import PackedWeight
from mla_convert.kernels.projection import TRITON_DTYPES, lift_output, lift_query
from mla_convert.patches.int4_packing import multiply_packed, pack, places_when_packed, scales_and_zeros, unpack
from mla_convert.patches.unpacking import multiply_in_pieces
from mla_convert.quantization import Quantized
from mla_convert.schemes import Scheme
from mla_convert.wording import option

TRITON = "triton"
INT8 = "int8 packed"
INT4 = "int4 packed"
PLAIN = "dequantized once"
EACH_CALL = "dequantized at each call"
_WORDS = {
    TRITON: "multiplied as codes (Triton)",
    INT8: "multiplied as codes (PyTorch's packed int8 product)",
    INT4: "multiplied as codes (PyTorch's packed int4 product)",
    PLAIN: PLAIN,
    EACH_CALL: EACH_CALL,
}
#: Products that take codes in the layout in which they are stored.
_AS_STORED = (TRITON, EACH_CALL)
#: What ``patch(codes=)`` takes: the fastest product, or the one that holds the fewest bytes.
CODES = ("auto", "keep")
#: The product on a CPU in bfloat16, by kind of codes and side ("fused" is one matrix for all heads, of either side).
#: The rule: a packed product is used where it was faster than the plain one in bfloat16 at V2-Lite's and at V3's
#: dimensions, at each in the median over thread counts. Smaller matrices are measured beside them and do not decide.
#: ``benchmarks/coded_products.py`` measures, and says what has to stand here; figures are in ``benchmarks/NOTES.md``.
#: What is not named is dequantized once.
CPU_PRODUCTS: dict[tuple[str, str], str] = {("int8", "fused"): INT8}
#: Every packed product that there is on a CPU, which ``codes="keep"`` uses.
PACKED_PRODUCTS: dict[tuple[str, str], str] = {
    ("int8", "key"): INT8,
    ("int8", "value"): INT8,
    ("int8", "fused"): INT8,
    ("int4", "value"): INT4,
    ("int4", "fused"): INT4,
}
#: What PyTorch's packed int4 product asks of the rows of a weight, and what the int8 one silently needs of the numbers
#: that are summed: with 12, 20, 40 or 100 of them, torch 2.13 returns wrong numbers in bfloat16, or crashes.
_MULTIPLE = 16


def check_codes(codes: str) -> None:
    """UsageError unless ``codes`` is one of :data:`CODES`."""
    if codes not in CODES:
        raise UsageError(f"{option('codes', codes)} is not known; supported are {', '.join(CODES)}")


def choose_product(
    scheme: Scheme,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    side: str,
    backend: str = "auto",
    codes: str = "auto",
) -> str:
    """The product for one head's weight [rows, columns] of ``side``: "key" (summed over rows), "value" or "fused".

    ``backend`` and ``codes`` are those of ``patch``: "torch" keeps Triton away, "triton" asks for it.
    """
    rows, columns = shape
    table, otherwise = (PACKED_PRODUCTS, EACH_CALL) if codes == "keep" else (CPU_PRODUCTS, PLAIN)
    if choose_backend(backend, device) == "triton":
        return TRITON if dtype in TRITON_DTYPES else otherwise
    if device.type != "cpu" or dtype != torch.bfloat16:
        return otherwise
    product = table.get((scheme.kind, side), otherwise)
    multiple = columns if product == INT8 and side != "key" else rows
    return product if multiple % _MULTIPLE == 0 else otherwise


def describe_product(scheme: Scheme, product: str) -> str:
    """Scheme and product in words."""
    return f"{scheme} {_WORDS[product]}"


class CodedProjection(nn.Module):
    """A quantized weight of H heads: the key side's [H·N, C], the value side's [H·V, C], or one of a fused form, H = 1.

    ``over_rows`` says that the product sums over the rows of a head (``lift_query``) and not over the columns, and
    ``backend`` is the one that the model was patched with.
    """

    codes: Tensor
    scale_bits: Tensor

    def __init__(self, weight: Quantized, heads: int, product: str, *, over_rows: bool, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.scheme = weight.scheme
        self.rows, self.columns = weight.shape[0] // heads, weight.shape[1]
        self.heads = heads
        self.over_rows = over_rows
        self.product = product
        self.register_buffer("scale_bits", weight.scales.contiguous().view(torch.int32), persistent=False)
        self.register_buffer("codes", self._lay_out(weight.codes), persistent=False)

    def _lay_out(self, codes: Tensor) -> Tensor:
        """Codes [rows of all heads, columns] as the product takes them."""
        if self.product in _AS_STORED:
            return codes.contiguous()
        heads = codes.view(self.heads, self.rows, -1)
        if self.product == INT8:
            return heads.transpose(1, 2).contiguous() if self.over_rows else heads.contiguous()
        return torch.stack([pack(head) for head in heads])

    @property
    def scales(self) -> Tensor:
        """float32, on the scheme's grid."""
        return self.scale_bits.view(torch.float32)

    def weight(self) -> Quantized:
        """The weight as it was given."""
        return Quantized(self._stored_codes(), self.scales, self.scheme)

    def _stored_codes(self) -> Tensor:
        if self.product in _AS_STORED:
            return self.codes
        if self.product == INT8:
            return (self.codes.transpose(1, 2) if self.over_rows else self.codes).reshape(-1, self.columns)
        places = places_when_packed(self.rows, self.columns)
        return torch.cat([unpack(head, places) for head in self.codes.cpu()]).to(self.codes.device)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, S, H, N] (``over_rows``) or [B, S, H, C], any strides, to [B, S, H, C] or [B, S, H, N or V]."""
        if self.product == EACH_CALL:
            return multiply_in_pieces(x, self.weight(), self.heads, over_rows=self.over_rows)
        if self.product == TRITON or x.device.type != "cpu" or x.dtype == torch.float64:
            return self._by_kernel(x)
        batch, q_len, heads, _ = x.shape
        rows = x.permute(2, 0, 1, 3).reshape(heads, batch * q_len, -1).contiguous()
        product = self._int8_product(rows) if self.product == INT8 else self._int4_product(rows)
        return product.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)

    def _by_kernel(self, x: Tensor) -> Tensor:
        codes = self._stored_codes()
        packed = PackedWeight(codes, self.scales, self.scheme.kind, self.scheme.blocks(self.columns))
        lift = lift_query if self.over_rows else lift_output
        return lift(x, packed, backend=self.backend)

    def _int8_product(self, rows: Tensor) -> Tensor:
        """[H, M, K] by the int8 codes of each head."""
        scales = self.scales.view(self.heads, self.rows)
        if self.over_rows:
            # Scales belong to what is summed: they are folded into the rows.
            share, whole = _share(scales, 1 << 7, dim=1, dtype=rows.dtype)
            rows = (rows * share[:, None]).to(rows.dtype)
            return self._int8(rows, whole.expand(-1, self.columns))
        if rows.dtype != torch.float16:
            return self._int8(rows, scales)
        # float16 would lose small scales, which multiply the result apart; a power of two keeps its sums in reach.
        sums = self._int8(rows, rows.new_full(scales.shape, 2**-7))
        return (sums * (scales * 2**7)[:, None]).to(rows.dtype)

    def _int8(self, rows: Tensor, scales: Tensor) -> Tensor:
        # The product reads scales one behind the other, whatever their strides.
        each = zip(rows.unbind(0), self.codes.unbind(0), scales.to(rows.dtype).contiguous().unbind(0), strict=True)
        return torch.stack([torch.ops.aten._weight_int8pack_mm(x, codes, scale) for x, codes, scale in each])

    def _int4_product(self, rows: Tensor) -> Tensor:
        share, whole = _share(self.scales.view(self.heads, self.rows, -1), 1 << 3, dim=2, dtype=rows.dtype)
        scales = scales_and_zeros(share, rows.dtype)
        return multiply_packed(rows, self.codes, scales, self.scheme.block[1]).mul_(whole.transpose(1, 2))


def _share(scales: Tensor, reach: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales as a product takes them in ``dtype``, and by what its result is multiplied.

    float16 would lose small scales: there they are shares of a power of two, at most 1 / ``reach``. Other dtypes hold
    them as they are, and a step is short enough for the difference to count.
    """
    if dtype != torch.float16:
        return scales, torch.ones_like(scales.narrow(dim, 0, 1))
    whole = torch.exp2(torch.ceil(torch.log2(scales.amax(dim=dim, keepdim=True) * reach)))
    return scales / whole, whole
