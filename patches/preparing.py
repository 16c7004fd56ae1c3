"""What is made ready before a model is touched: the options, checked, and the layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mla_convert.architectures import Family
from mla_convert.errors import UsageError
from mla_convert.kernels.dispatch import choose_backend
from mla_convert.patches.cache import LatentCache
from mla_convert.patches.cache_formats import parse_cache
from mla_convert.patches.cache_rows import code_dtype
from mla_convert.patches.coded import check_codes
from mla_convert.patches.layer import AbsorbedLayer, Options
from mla_convert.patches.modules import query_name
from mla_convert.patches.recognition import resolve_forms
from mla_convert.patches.sidecar import Asked, Sidecar
from mla_convert.patches.sources import check_fusable, check_readable, check_whole


def parse_options(model: Any, backend: str, prefill_threshold: int | str, cache: str, codes: str) -> Options:
    """The options of ``patch``; UsageError for what cannot be, or no model."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"patch takes a transformers model, found {type(model).__name__}: load it first, or call mla_convert.load"
        )
    form = parse_cache(cache)
    check_codes(codes)
    choose_backend(backend, model.device, code_dtype(form), model.dtype)
    whole = isinstance(prefill_threshold, int) and not isinstance(prefill_threshold, bool) and prefill_threshold >= 0
    if not whole and prefill_threshold != "auto":
        raise UsageError(f'prefill_threshold is "auto" or a number of tokens from 0, found {prefill_threshold!r}')
    if form is not None and form.coded:
        LatentCache(model.config, format=str(form))  # refuses what no layer of the model could use
    return Options(backend, prefill_threshold, cache, str(codes))


def build_layer(
    name: str, module: Any, family: Family | None, asked: Asked, options: Options, sidecar: Sidecar | None
) -> AbsorbedLayer:
    """The absorbed side of one attention module, from its own weights or from those of ``sidecar``."""
    check_readable(f"{name}.kv_b_proj", module.kv_b_proj)
    if sidecar is not None:
        check_whole(f"{name}.kv_b_proj", module.kv_b_proj, sidecar.label)
    stored = None if sidecar is None else sidecar.stored(name, module, asked)
    forms = resolve_forms(module, family, asked.qk, asked.vo) if stored is None else stored.forms
    for part, form in ((query_name(module), forms.qk), ("o_proj", forms.vo)):
        if form == "fused":
            check_fusable(f"{name}.{part}", getattr(module, part))
    return AbsorbedLayer(module, name, forms, options, stored)
