"""Compiling ahead what a patched model's first steps would compile: attention, and products with coded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.kernels.projection import ROW_BLOCKS
from mla_convert.kernels.warming import ONE_TOKEN, Kind, Store, warm_up
from mla_convert.patches.cache_formats import CacheFormat
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.coded import TRITON, CodedProjection
from mla_convert.patches.layer import AbsorbedLayer, layer_of
from mla_convert.patches.selection import METHOD, selected


@torch.no_grad()
def warm_model(model: nn.Module) -> int:
    """Run each kind of call once that the layers of a patched model make; how many ran."""
    ran, seen = 0, set()
    for module in model.modules():
        layer = layer_of(module)
        if layer is None:
            continue
        kinds = _kinds(module)
        same = (layer.geometry, layer.dtype, layer.sources[0].device, kinds, tuple(sorted(layer.products.items())))
        if same not in seen:
            ran += warm_up(layer.options.backend, layer.geometry.num_heads, _store(layer), kinds) + _products(layer)
        seen.add(same)
    return ran


def _kinds(module: Any) -> tuple[Kind, ...]:
    """Those of a module without an indexer, and the one that an indexer adds: beside a mask, or complete in itself."""
    chosen = selected(module, {})
    if chosen is None:
        return ONE_TOKEN
    return *ONE_TOKEN, Kind(masked=not hasattr(type(module), METHOD), chosen=chosen)


def _store(layer: AbsorbedLayer) -> Store:
    """Histories as the cache that was asked for stores them."""
    g, form, device = layer.geometry, layer.options.cache_format, layer.sources[0].device
    layout = RowLayout(form or CacheFormat(), g.kv_lora_rank, g.qk_rope_head_dim, layer.dtype)

    def store(tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        if form is None:  # transformers' caches keep both halves apart
            latent, k_rope = (torch.zeros(1, tokens, n, dtype=layer.dtype, device=device) for n in halves)
            return latent, k_rope, None
        rows = torch.zeros(1, tokens, layout.width, dtype=layout.stored_dtype, device=device)
        return layout.codes(rows), layout.k_rope(rows), layout.scale(rows)

    halves = (layout.latent, layout.rope)
    return store


def _products(layer: AbsorbedLayer) -> int:
    """The layer's products with coded weights in Triton, for few rows of activations and for many."""
    ran = 0
    for weight in (layer.coded_qk, layer.coded_vo):
        if weight is not None and weight.product == TRITON:
            for tokens in (1, *(size + 1 for size in ROW_BLOCKS[:-1])):
                weight(_activations(layer, weight, tokens))
                ran += 1
    return ran


def _activations(layer: AbsorbedLayer, weight: CodedProjection, tokens: int) -> Tensor:
    """Zeros with the strides that attention hands on: the query's are a part of its heads, all others contiguous."""
    device = weight.codes.device
    if not weight.over_rows:
        return torch.zeros(1, tokens, weight.heads, weight.columns, dtype=layer.dtype, device=device)
    query = torch.zeros(1, weight.heads, tokens, layer.geometry.qk_head_dim, dtype=layer.dtype, device=device)
    return query[..., : weight.rows].transpose(1, 2)
