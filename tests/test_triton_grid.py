"""The Triton kernel over the whole grid of head counts, new tokens, widths, caches and tiles."""

from __future__ import annotations

import dataclasses
import itertools
import random

import interpreter  # noqa: F401  # before the kernel
import pytest
import torch
from decode_cases import Case, build
from test_decode import assert_close
from test_triton_decode import TILES, launched

from mla_convert.kernels.tiles import Tile

GRID = [
    (heads, q_len, dims)
    for heads in (1, 3, 6, 12, 16, 32, 63, 64, 126, 128)
    for q_len in (1, 2, 4, 8)
    for dims in ((512, 64), (256, 64), (256, 32), (128, 32), (1024, 64), (192, 32), (64, 0))
]


def grid_cases(heads: int, q_len: int, dims: tuple[int, int]) -> list[tuple[Case, str]]:
    """What a point of the grid is run with, and the name of its tile: everything else drawn, the same in every run."""
    draw = random.Random(f"0: {heads} {q_len} {dims}")
    return [
        (
            Case(
                heads=heads,
                q_len=q_len,
                latent=dims[0],
                rope=dims[1],
                lens=draw.choice(((0, 1), (20, 63), (64, 65), (140, 33))),
                layout=draw.choice(("joint", "paged", "paged", "strided", "separate")),
                page=draw.choice((1, 16, 64)),
                dtype=draw.choice((torch.float32, torch.float16)),
                codes=draw.choice((None, "fp8/group", "fp8/tensor", "int8/token")),
                masked=draw.random() < 0.4,
                sinks=draw.random() < 0.4,
            ),
            draw.choice([*TILES]),
        )
        for _ in range(2 if heads * q_len * dims[0] < 1 << 15 else 1)
    ]


def test_the_grid_brings_every_two_choices_together() -> None:
    met = []
    for point in GRID:
        for case, tile in grid_cases(*point):
            names = ("heads", "q_len", "lens", "layout", "dtype", "codes", "masked", "sinks")
            chosen = {name: getattr(case, name) for name in names} | {"dims": (case.latent, case.rope), "tile": tile}
            met.append(chosen | ({"page": case.page} if case.layout == "paged" else {}))
    for one, other in itertools.combinations(met[0] | {"page": 1}, 2):
        pairs = {(case[one], case[other]) for case in met if one in case and other in case}
        wanted = set(itertools.product(*({case[name] for case in met if name in case} for name in (one, other))))
        if {one, other} == {"layout", "page"}:
            wanted = {("paged", page) for page in (1, 16, 64)}
        assert pairs == wanted, (one, other, wanted - pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "q_len", "dims"), GRID, ids=str)
def test_whole_grid(heads: int, q_len: int, dims: tuple[int, int]) -> None:
    """Every head count, number of new tokens and width; lengths, pages, dtypes, codes and tiles in turn."""
    for case, name in grid_cases(heads, q_len, dims):
        # The interpreter takes as long for a large tile as for a small one.
        tile = dataclasses.replace(TILES[name], block_rows=128) if heads * q_len > 16 else TILES[name]
        args = build(case)
        assert_close(args, *launched(args, tile))


@pytest.mark.slow
def test_long_history() -> None:
    args = build(Case(batch=1, heads=16, lens=(4096,), latent=512, rope=64))
    assert_close(args, *launched(args, Tile(16, 64, 1, 1, split_tokens=512)))
