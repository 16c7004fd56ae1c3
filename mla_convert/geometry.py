"""The dimensions of one MLA layer, and the letters used for them everywhere.

One letter a dimension, in docstrings, kernels and tests alike; einsum letters are the same in
lower case. Sizes are DeepSeek-V3's.

=====  =====================  =====  ====================================================
letter name                   V3     meaning
=====  =====================  =====  ====================================================
B                                    sequences in the batch
S      q_len                         new tokens in this step
T      kv_len                        cached tokens, new ones included
D      hidden_size            7168   model width
H      num_heads              128    query heads
Q      query_rank             1536   width the query is projected from (D without q_lora_rank)
C      kv_lora_rank           512    latent width, what is cached
N      qk_nope_head_dim       128    per-head content width of query and key
R      qk_rope_head_dim       64     rotary width; the key's half is shared by all heads; may be 0
V      v_head_dim             128    per-head value width
=====  =====================  =====  ====================================================

======================  ================  ==========================================================
tensor                  shape             stored as
======================  ================  ==========================================================
W_DKV, W_KR             [C + R, D]        ``kv_a_proj_with_mqa.weight``, latent rows first
W_UK, W_UV              [H, N, C],        ``kv_b_proj.weight`` viewed as [H, N + V, C]: in each head
                        [H, V, C]         N key rows, then V value rows
W_UQ, W_QR              [H, N, Q],        ``q_b_proj.weight`` (or ``q_proj.weight``) viewed as
                        [H, R, Q]         [H, N + R, Q]
W_O                     [D, H, V]         ``o_proj.weight`` viewed as [D, H, V]
======================  ================  ==========================================================

The mathematics stands in :mod:`mla_convert.absorption`.
"""

from __future__ import annotations

import dataclasses
import math

from mla_convert.errors import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class MLAGeometry:
    """Dimensions and softmax scale of one MLA layer; the letters are in the module's table.

    ``scale`` multiplies the logits: ``(N + R) ** -0.5``, times ``mscale ** 2`` where YaRN is used
    with ``mscale_all_dim``. It always comes from the width before absorption.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    scale: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("q_lora_rank", "scale") or (field.name == "qk_rope_head_dim" and value == 0):
                continue
            if not isinstance(value, int) or value <= 0:
                raise UnsupportedModelError(
                    f"the config gives {field.name} = {value!r}; an MLA layer needs a positive whole number there"
                )

    @property
    def query_rank(self) -> int:
        """Q: the width that the query's up-projection reads (the hidden size without ``q_lora_rank``)."""
        return self.hidden_size if self.q_lora_rank is None else self.q_lora_rank

    @property
    def qk_head_dim(self) -> int:
        """N + R: the width of one head's query and expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """C + R: numbers cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_b_shape(self) -> tuple[int, int]:
        """Shape of ``kv_b_proj.weight``: [H·(N + V), C]."""
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank

    @property
    def q_b_shape(self) -> tuple[int, int]:
        """Shape of ``q_b_proj.weight`` or ``q_proj.weight``: [H·(N + R), Q]."""
        return self.num_heads * self.qk_head_dim, self.query_rank

    @property
    def o_shape(self) -> tuple[int, int]:
        """Shape of ``o_proj.weight``: [D, H·V]."""
        return self.hidden_size, self.num_heads * self.v_head_dim


def softmax_scale(qk_head_dim: int, *, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """``qk_head_dim ** -0.5 * mscale ** 2`` with YaRN's ``mscale = 0.1 · mscale_all_dim · ln(factor) + 1``.

    ``mscale_all_dim = 0`` or ``factor <= 1`` means no correction, as in DeepSeek's own code.
    """
    mscale = 1.0 if factor <= 1 or not mscale_all_dim else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    scale: float = qk_head_dim**-0.5 * mscale * mscale
    return scale
