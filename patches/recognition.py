"""Which modules of a model are MLA attention, which family they are of, and where their config stands."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from mla_convert.architectures import FAMILIES, Family, find_family
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.forms import Form, Forms, choose_form
from mla_convert.patches.modules import module_geometry, query_name
from mla_convert.patches.sources import only_plain
from mla_convert.wording import option

logger = logging.getLogger(__name__)


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of a model's MLA attention: those with transformers' seam ``expand_kv``.

    Raises:
        UnsupportedModelError: when there are none.
    """
    found = [(n, m) for n, m in model.named_modules() if hasattr(type(m), "expand_kv") and hasattr(m, "kv_b_proj")]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {kind!r}) has no MLA attention with transformers' expand_kv; "
            f"supported are: {', '.join(sorted(FAMILIES))}. Models with their own code must be loaded without "
            "trust_remote_code"
        )
    return found


def family_of(model: Any, modules: Sequence[nn.Module], *, allow_unknown: bool) -> Family | None:
    """The row of the table for a model's attention; None for an unknown class that is allowed.

    Raises:
        UnsupportedModelError: an unknown class that is not allowed, or attention that looks ahead.
    """
    classes = {type(module).__name__ for module in modules}
    rows = [family for family in FAMILIES.values() if {family.attention_class} == classes]
    if not rows and not allow_unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses {', '.join(sorted(classes))}, which is not among the supported families "
            f"({', '.join(sorted(FAMILIES))}). It has the same seam: patch(model, allow_unknown=True) tries it, and "
            "mla-convert verify tells whether it holds"
        )
    if not getattr(modules[0].config, "is_causal", True):
        raise UnsupportedModelError("the config says is_causal=false; absorbed decode is for causal attention")
    if not rows:
        logger.warning("patching %s, which is not a known family: verify the result", ", ".join(sorted(classes)))
        return None
    return next(_named(rows, (model.config, modules[0].config)), rows[0])


def _named(rows: Sequence[Family], configs: Iterable[Any]) -> Iterator[Family]:
    """Of several families with one class, those that the model's or the text model's config names."""
    for config in configs:
        try:
            family = find_family({"model_type": getattr(config, "model_type", None)})
        except UnsupportedModelError:
            continue
        if family in rows:
            yield family


def attention_setting(model: Any, modules: Sequence[nn.Module], name: str) -> str | dict[str, str]:
    """What ``set_attn_implementation`` takes, so that ``name`` is set for the text model and for nothing else.

    Raises:
        PatchError: where the modules' config is not one that the model sets.
    """
    config: Any = modules[0].config
    if any(module.config is not config for module in modules):
        raise PatchError(
            f"{type(model).__name__}: its attention modules do not share one config; patch its parts alone"
        )
    if model.config is config:
        return name
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is config:
            return {key: name}
    raise PatchError(
        f"{type(model).__name__}: the config of its attention is neither the model's nor one of its sub-configs "
        f"({', '.join(model.config.sub_configs)}); patch the text model alone"
    )


def resolve_forms(module: Any, family: Family | None, qk: str, vo: str) -> Forms:
    """The form of each side, "auto" resolved: a side that may not be fused is refused, or factored under "auto".

    Raises:
        UsageError: "fused" where it cannot be, with the reason.
    """
    cheaper = choose_form(module_geometry(module))
    if not only_plain(module.kv_b_proj, getattr(module, query_name(module)), module.o_proj):
        cheaper = Forms("factored", "factored")
    unknown = "the family is not known, and something may happen between its two projections"
    between_qk, between_vo = (unknown, unknown) if family is None else (family.between_qk, family.between_vo)
    return Forms(
        qk=_resolve_side("key", qk, cheaper.qk, between_qk), vo=_resolve_side("value", vo, cheaper.vo, between_vo)
    )


def _resolve_side(side: str, wanted: str, cheaper: Form, between: str) -> Form:
    if wanted == "fused" and between:
        raise UsageError(
            f"the {side} side of this model cannot be fused: {between}; use {option('form', 'auto')} or "
            "'factored' for that side"
        )
    if wanted == "auto":
        return "factored" if between else cheaper
    return "fused" if wanted == "fused" else "factored"
