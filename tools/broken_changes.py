"""Each feature, what is broken of it on purpose, and the tests that must turn red."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

#: A function of the package as ``module:name.name``, and what is put in its place, made from the original.
Change = tuple[str, Callable[[Any], Any]]

ATTEND = "mla_convert.patches.layer:AbsorbedLayer.attend"
DECODE = "mla_convert.patches.layer:decode"
LAYER = "mla_convert.patches.latent_layer:LatentLayer"
SLOT = "mla_convert.patches.call:CallSlot"
WEIGHTS = "mla_convert.patches.weights:AbsorbedWeights"


@dataclasses.dataclass(frozen=True)
class Row:
    """``how`` says what the ``changes`` do; each of ``tests`` must have a failure under them."""

    feature: str
    how: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def does(result: Any) -> Callable[[Any], Any]:
    """Instead of the original: a function that gives ``result``."""
    return lambda original: lambda *args, **kwargs: result


def before(change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[[Any], Any]:
    """The original with other arguments."""

    def make(original: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = change(*args, **kwargs)
            return original(*args, **kwargs)

        return functools.wraps(original)(changed)

    return make


def after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The original with another result."""
    return lambda original: functools.wraps(original)(lambda *args, **kwargs: change(original(*args, **kwargs)))


def decoding(change: Callable[[Any], dict[str, Any]]) -> Change:
    """Fields of ``absorbed_decode``'s arguments replaced."""
    return DECODE, before(lambda args, backend: ((dataclasses.replace(args, **change(args)), backend), {}))


def attending(change: Callable[..., tuple[Any, ...]]) -> Change:
    """Other arguments (layer, query, latent, k_rope, scale, call, seen) for attention in latent space."""
    return ATTEND, before(lambda *args: (change(*args), {}))


def seeing_ahead(args: Any) -> dict[str, Any]:
    """No mask and no causal rule, where several tokens are new."""
    batch, count = args.q_latent.shape[:2]
    return {"mask": None, "kv_lens": torch.full((batch,), args.kv_len + count - 1)} if count > 1 else {}


def masked(args: Any) -> dict[str, Any]:
    """A selection as a mask over the whole history."""
    if args.indices is None:
        return {}
    from mla_convert.kernels.selecting import chosen

    seen = chosen(args.indices, args.kv_len)
    return {"indices": None, "mask": seen if args.mask is None else args.mask & seen}


def no_window(original: Any) -> Any:
    """A mask that hides nothing before the last token that it shows."""

    def seen_by(query: Any, kv_len: int, mask: Any, call: Any, kwargs: dict[str, Any], **more: Any) -> Any:
        if kwargs.get("sliding_window") is not None and mask is not None:
            shown = mask if mask.dtype == torch.bool else mask >= 0
            mask = shown.flip(-1).cummax(-1).values.flip(-1)
        return original(query, kv_len, mask, call, kwargs, **more)

    return seen_by


def factor_one(layer: Any, query: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    if rest[3].q_latent is not None:
        query = query.clone()
        query[..., 0] = 1
    return layer, query, *rest


def part_of_content(layer: Any, query: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    if not layer.geometry.qk_rope_head_dim:
        fused = rest[3].q_latent
        content = (query if fused is None else fused).clone()
        content[..., -4:] = 0
        query, rest[3].q_latent = (content, None) if fused is None else (query, content)
    return layer, query, *rest


def one_token_late(layer: Any, query: torch.Tensor, latent: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    return layer, query, latent.roll(1, dims=1) if layer.shares else latent, *rest


def noting_owner(original: Any) -> Any:
    def made(self: Any, owner: Any, *args: Any) -> None:
        original(self, owner, *args)
        self.shares = getattr(owner, "kv_a_layernorm", None) is None

    return made


def other_heads(original: Any) -> Any:
    def attend(self: Any, *args: Any) -> torch.Tensor:
        out = original(self, *args)
        return out.roll(1, dims=2) if self.forms.vo == "fused" else out

    return attend


def heads_back(original: Any) -> Any:
    def make_output(self: Any, out: torch.Tensor, bias: Any) -> Any:
        return original(self, out.view(*out.shape[:2], self.geometry.num_heads, -1).roll(-1, dims=2).flatten(2), bias)

    return make_output


def without_youtu(rows: Any) -> dict[str, Any]:
    return {name: row for name, row in rows.items() if name != "youtu"}


def first_layer_alone(modules: list[Any]) -> list[Any]:
    return [(name, module) for name, module in modules if not name.endswith(".1")]


def drawing(*args: Any) -> tuple[Any, ...]:
    torch.rand(1)
    return args


def breaking(*args: Any) -> tuple[Any, ...]:
    torch._dynamo.graph_break()
    return args


CALLS = {"number": 0}


def counting(*args: Any) -> tuple[Any, ...]:
    CALLS["number"] += 1
    layer, query, *rest = args
    return layer, query * (1 if CALLS["number"] > 0 else 2), *rest


def one_for_all(original: Any) -> Any:
    """The same latent layer in every cache."""
    from mla_convert.patches.latent_layer import LatentLayer

    kept: dict[int, Any] = {}

    def adopt(cache: Any, index: int, form: Any = None) -> None:
        original(cache, index, form)
        if index < len(cache.layers) and isinstance(cache.layers[index], LatentLayer):
            cache.layers[index] = kept.setdefault(index, cache.layers[index])

    return adopt


def every_kind(original: Any) -> Any:
    """Latent layers in the place of windows and codes, too."""
    from transformers.cache_utils import DynamicLayer

    from mla_convert.patches.latent_layer import LatentLayer

    def adopt(cache: Any, index: int, form: Any = None) -> None:
        original(cache, index, form)
        layer = cache.layers[index] if index < len(cache.layers) else None
        if isinstance(layer, DynamicLayer) and not isinstance(layer, LatentLayer) and not layer.is_initialized:
            cache.layers[index] = LatentLayer(form)

    return adopt


def as_if_not_offloaded(original: Any) -> Any:
    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        before = getattr(cache, "offloading", None)
        if before:
            cache.offloading = False
        original(module, args, kwargs)
        if before:
            cache.offloading = True

    return begin


def first_row_lost(original: Any) -> Any:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        self.rows[:, :1] = 0
        return found

    return update


def shallow(original: Any) -> Any:
    def copied(self: Any, memo: Any) -> Any:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    return copied


def forgetful(original: Any) -> Any:
    def copied(self: Any, memo: Any) -> Any:
        other = original(self, memo)
        other._replace(torch.zeros_like)
        return other

    return copied


def persistent(original: Any) -> Any:
    return lambda self, name, tensor: self.register_buffer(name, tensor)


def always_on(original: Any) -> Any:
    def keep(self: Any, name: str, tensor: torch.Tensor) -> None:
        original(self, name, tensor if tensor.numel() else getattr(self, name, tensor))

    return keep


PRESENT: dict[str, Any] = {"call": None}


def late(original: Any) -> Any:
    def get(self: Any) -> Any:
        time.sleep(0.0005)  # time for another thread
        return PRESENT["call"]

    return get


def not_plain_doubled(original: Any) -> Any:
    from mla_convert.patches.forms import PLAIN
    from mla_convert.patches.sources import reader_of

    def effective(where: str, linear: Any, *args: Any) -> torch.Tensor:
        return original(where, linear, *args) * (1 if reader_of(where, linear).label == PLAIN.label else 2)

    return effective


def scales_of_the_first(original: Any) -> Any:
    """Rows of a weight dequantized with the scales that its first rows have."""

    def changed(weight: Any, start: int, stop: int) -> Any:
        moved = dataclasses.replace(weight, codes=weight.codes[start:stop])
        return original(moved, 0, stop - start)

    return changed
