"""Attention of a few new tokens over a latent cache: references, backends and their choice."""

from mla_convert.kernels.dispatch import absorbed_decode
from mla_convert.kernels.history import flashmla_views
from mla_convert.kernels.merging import merge

__all__ = ["absorbed_decode", "flashmla_views", "merge"]
