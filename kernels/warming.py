"""Compiling ahead of time, on the device, what decoding would compile in its first steps.

Triton compiles a kernel for what a call is made of: formats, tile, and which of mask, lengths and indices there are;
not for how long the history is (``decode_kernel.CHANGING``). So each kind of call is run once, on zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from mla_convert.kernels.arguments import DecodeArguments, LatentScale
from mla_convert.kernels.custom_op import run_backend
from mla_convert.kernels.dispatch import choose_backend

#: (latent, k_rope, latent_scale) of one sequence of so many tokens, as the cache stores them.
Store = Callable[[int], tuple[torch.Tensor, torch.Tensor, LatentScale | None]]

#: Numbers of new tokens, beside one, among which every tile of the table is chosen.
_SEVERAL = (2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A call: new tokens, and what says which positions they see; ``chosen`` positions of an indexer, 0 for none."""

    q_len: int = 1
    masked: bool = False
    lengths: bool = False
    chosen: int = 0


#: One new token: of one sequence, of a padded batch, in a cache that hands out its capacity. Several at once under a
#: mask are as the last.
ONE_TOKEN = (Kind(), Kind(masked=True), Kind(masked=True, lengths=True))


def warm_up(backend: str, heads: int, store: Store, kinds: tuple[Kind, ...] = ONE_TOKEN) -> int:
    """Run every kind of call that decoding makes, with one part of the history and with several.

    Args:
        backend: as for ``absorbed_decode``.
        heads: H.
        store: makes histories, in the model's dtype and on its device.
        kinds: of calls with one new token or a mask; those of several tokens without one are added.

    Returns:
        How many calls ran; 0 where PyTorch computes, which compiles nothing.
    """
    latent, k_rope, _ = store(1)
    if choose_backend(backend, k_rope.device, latent.dtype, k_rope.dtype) != "triton":
        return 0
    ran = 0
    for kind in (*kinds, *_several(heads, store)):
        for tokens in _histories(heads, store, kind):
            run_backend("triton", _arguments(heads, store, kind, tokens))
            ran += 1
    return ran


def _arguments(heads: int, store: Store, kind: Kind, tokens: int) -> DecodeArguments:
    latent, k_rope, scale = store(tokens)
    device, positions = k_rope.device, (1, kind.q_len)
    width = latent.shape[2]
    query = torch.zeros(*positions, heads, width + k_rope.shape[2], dtype=k_rope.dtype, device=device)
    return DecodeArguments(
        query[..., :width],
        query[..., width:],
        latent,
        k_rope,
        1.0,
        kv_lens=torch.full((1,), tokens, device=device) if kind.lengths else None,
        mask=torch.ones(*positions, tokens, dtype=torch.bool, device=device) if kind.masked else None,
        indices=torch.zeros(*positions, kind.chosen, dtype=torch.int64, device=device) if kind.chosen else None,
        latent_scale=scale,
    )


def _histories(heads: int, store: Store, kind: Kind) -> tuple[int, ...]:
    """Lengths in one part and in several; an indexer's choice, of one size, divides them itself."""
    from mla_convert.kernels.triton_decode import tile_for

    if kind.chosen:
        return (kind.chosen + 1,)
    return 16, tile_for(_arguments(heads, store, kind, 16)).split_tokens + 16


def _several(heads: int, store: Store) -> Iterator[Kind]:
    """Several new tokens without a mask, in each tile that some number of them gets."""
    from mla_convert.kernels.triton_decode import tile_for

    seen = set()
    for kind in (Kind(q_len=number) for number in _SEVERAL):
        tile = tile_for(_arguments(heads, store, kind, 16))
        if tile not in seen:
            yield kind
        seen.add(tile)
