"""What an attention module says of itself."""

from __future__ import annotations

import torch

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import PatchError
from mla_convert.geometry import MLAGeometry
from mla_convert.patches.freshness import Owner
from mla_convert.patches.sources import shape_of


def query_name(module: Owner) -> str:
    """Which submodule makes the query's heads: ``q_b_proj``, ``q_gate_proj``, or ``q_proj`` without a query rank."""
    return next((name for name in ("q_b_proj", "q_gate_proj") if getattr(module, name, None) is not None), "q_proj")


def module_geometry(module: Owner) -> MLAGeometry:
    """Dimensions of an attention module, from the module itself; the number of heads from its local weight."""
    n, v = int(module.qk_nope_head_dim), int(module.v_head_dim)
    rows, _ = shape_of("kv_b_proj", module.kv_b_proj)
    if rows % (n + v):
        raise PatchError(
            f"kv_b_proj has {rows} rows here, which are not whole heads of {n} + {v}: shard the model over a number of "
            "processes that divides its heads"
        )
    # q_gate_proj reads the query latent twice, normed and not.
    times = {"q_proj": 0, "q_b_proj": 1, "q_gate_proj": 2}[query_name(module)]
    return MLAGeometry(
        hidden_size=int(module.o_proj.out_features),
        num_heads=rows // (n + v),
        kv_lora_rank=int(module.kv_lora_rank),
        qk_nope_head_dim=n,
        qk_rope_head_dim=int(module.qk_rope_head_dim),
        v_head_dim=v,
        q_lora_rank=times * int(module.q_lora_rank) if times else None,
        scale=float(module.scaling),
    )


def weight_dtype(module: Owner) -> torch.dtype:
    """The dtype of an attention module's weights; of the latent's norm, or the config's, where they are codes."""
    weight, norm = getattr(module.kv_b_proj, "weight", None), getattr(module, "kv_a_layernorm", None)
    found = [weight.dtype if weight is not None else None, norm.weight.dtype if norm is not None else None]
    found.append(getattr(module.config, "dtype", None))
    return next((dtype for dtype in found if dtype in FLOAT_DTYPES), torch.float32)
