"""What attention touches over a ``StaticCache``: the tokens stored, whatever the cache has room for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import decode_bounds
import family_models
import models
import pytest
import torch
from decode_cases import Case, build
from patching import BOUND, expanded_widths
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mla_convert
from mla_convert.kernels import absorbed_decode, torch_decode

CAPACITIES = (128, 32768)
#: Of V2-Lite, with an indexer that chooses as many tokens as published ones do.
WIDTHS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_head_dim": 128,
}
#: Bytes: what reads a mask to its end and keeps a flag for each position; what makes columns of positions.
PER_POSITION, PER_CHOICE = 4, 48
NARROWER = {"glm5_next": {"qk_rope_head_dim": 0}, "dots3_note": {"head_dim": 192}, "mistral_large4": {"head_dim": 128}}
SPARSE = [
    name
    for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note", "glm5_next", "mistral_large4")
    if name in family_models.AVAILABLE
]


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, views left out; of what is gathered from, the rows that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        taken = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage().data_ptr() for t in taken}
        if not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in before for t in made if t.numel()):
            return out
        gathers = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.gather, torch.ops.aten.index_select)
        self.bytes += sum(map(_size, (made * 2 + taken[1:]) if gathers else (made + taken)))
        return out


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: what is expanded stands there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[int]]]:
    """Counts each call of an attention function, by the name that it is registered under."""
    replaced: dict[str, Any] = {}

    def count(name: str) -> list[int]:
        seen: list[int] = []
        function = replaced[name] = ALL_ATTENTION_FUNCTIONS[name]

        def counting(*args: Any, **kwargs: Any) -> Any:
            with Traffic() as counted:
                result = function(*args, **kwargs)
            seen.append(counted.bytes)
            return result

        AttentionInterface.register(name, counting)
        return seen

    yield count
    for name, function in replaced.items():
        AttentionInterface.register(name, function)


@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_the_attention_function_touches_what_is_stored(model_type: str, traffic: Callable[[str], list[int]]) -> None:
    """Beside that, the mask twice, to find its end, and what is made of each position chosen to mark it."""
    model, ids = family_models.make(model_type, **WIDTHS | NARROWER.get(model_type, {})), models.tokens(1, 101)
    with mla_convert.patched(model):
        seen = traffic(model.config.get_text_config()._attn_implementation)
        touched = {}
        for capacity in CAPACITIES:
            cache = StaticCache(config=model.config, max_cache_len=capacity)
            model(ids[:, :100], cache=cache)
            seen.clear()
            model(ids[:, 100:], cache=cache, position_ids=torch.tensor([[100]]))
            touched[capacity] = list(seen)
    few, many = (touched[capacity] for capacity in CAPACITIES)
    assert len(few) == len(many) > 0
    for a, b in zip(few, many, strict=True):
        assert b <= 1.5 * a and b - a <= PER_POSITION * CAPACITIES[1] + PER_CHOICE * WIDTHS["index_topk"]


@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_an_expanded_prefill_expands_what_is_stored(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the capacity, which transformers expands; in chunks, too, and padded."""
    model = family_models.make(model_type)
    cache = functools.partial(StaticCache, max_cache_len=300)
    expected = family_models.both(model, cache)
    (kind,) = {type(m) for m in model.modules() if hasattr(type(m), "expand_kv")}
    with mla_convert.patched(model, prefill_threshold=0):
        widths = expanded_widths(kind, monkeypatch)
        found = family_models.both(model, cache)
    assert models.worst(found, expected) <= BOUND
    assert widths and max(widths) <= sum(family_models.SIZES)


@torch.no_grad()
def test_the_decision_counts_what_is_stored(runs: list[int]) -> None:
    """The room of a padded cache is expanded by nobody: as many new tokens run absorbed as over a ``DynamicCache``."""
    model, (ids, mask) = models.deepseek_v3(), (models.tokens(2, 40), torch.ones(2, 40, dtype=torch.long))
    mask[0, :3] = 0
    with mla_convert.patched(model):
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=4000)):
            for at, size in ((0, 12), (12, 8), (20, 5), (25, 1)):
                seen = slice(0, at + size)
                model(ids[:, at : at + size], attention_mask=mask[:, seen], cache=cache)
    assert runs[: len(runs) // 2] == runs[len(runs) // 2 :] and set(runs) - {1}


@pytest.mark.parametrize("layout", ["separate", "paged"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_no_more_stored_than_chosen_is_not_gathered(masked: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps know the lengths when they run: they read what is stored, and see the positions chosen alone."""
    args = build(Case(batch=3, lens=(17, 9, 0), q_len=2, masked=masked, layout=layout))
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(19, generator=generator) for _ in range(6)]).view(3, 2, 19)
    args = dataclasses.replace(args, indices=torch.where(order % 4 == 1, -1, order))
    monkeypatch.setattr(torch_decode, "_gathered", None)
    out, lse = absorbed_decode(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    limits = decode_bounds.bounds(args)
    error, lse_error = limits.errors(out, lse)
    assert error <= limits.out and lse_error <= limits.lse
