"""Offsets past 2³¹: a cache of 7,800 pages × 480 tokens × 576 numbers, of which nearly all is a hole in a file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import interpreter  # noqa: F401  # before the kernel
import pytest
import torch

from mla_convert.kernels import triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check
from mla_convert.kernels.tiles import Tile

PAGES, PAGE, WIDTH, LATENT = 7_800, 480, 576, 512
TOKENS = 40
#: Tiles of 16 tokens lie inside a page of 480: its number is read once a tile. Of those of 64, once a token.
TILES = {
    "page of a tile": Tile(16, 16, 1, 1, piece=128),
    "page of a token": Tile(16, 64, 1, 1, transposed=True, piece=128),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.Tensor]:
    path = tmp_path_factory.mktemp("cache") / "pages"
    numbers = PAGES * PAGE * WIDTH
    assert numbers > 1 << 31
    with path.open("wb") as file:
        file.truncate(2 * numbers)
    cache = torch.from_file(str(path), shared=True, size=numbers, dtype=torch.float16).view(PAGES, PAGE, WIDTH)
    cache[-1, :TOKENS] = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    yield cache
    pathlib.Path(path).unlink()


def problem(cache: torch.Tensor, **fields: torch.Tensor) -> DecodeArguments:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 1, 2, WIDTH, generator=generator).to(torch.float16)
    args = DecodeArguments(
        query[..., :LATENT], query[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:], scale=0.04
    )
    return check(dataclasses.replace(args, **fields))


def near(pages: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens at the beginning of a small cache."""
    return triton_decode.launch(problem(pages[-1:, :TOKENS].clone()), tile)


def assert_equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert wanted[0].abs().max() > 0.1
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_last_page(pages: torch.Tensor, tile: Tile) -> None:
    table, lengths = torch.tensor([[PAGES - 1]], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    assert_equal(triton_decode.launch(problem(pages, block_table=table, kv_lens=lengths), tile), near(pages, tile))


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_last_tokens(pages: torch.Tensor, tile: Tile) -> None:
    whole = pages.view(1, PAGES * PAGE, WIDTH)
    positions = torch.arange(TOKENS, dtype=torch.int32).view(1, 1, -1) + (PAGES - 1) * PAGE
    assert_equal(triton_decode.launch(problem(whole, indices=positions), tile), near(pages, tile))


def test_last_sequence(pages: torch.Tensor) -> None:
    """Sequences that are half the cache apart."""
    tile = TILES["page of a tile"]
    halves = pages.view(2, PAGES // 2 * PAGE, WIDTH)
    last = halves.as_strided((2, TOKENS, WIDTH), (0, WIDTH, 1), int((PAGES - 1) * PAGE * WIDTH))
    far = halves.as_strided((2, TOKENS, WIDTH), ((PAGES - 1) * PAGE * WIDTH, WIDTH, 1))
    args = problem(last[:1])
    both = {name: getattr(args, name).repeat(2, 1, 1, 1) for name in ("q_latent", "q_rope")}
    found = triton_decode.launch(problem(far, **both), tile)
    wanted = near(pages, tile)
    assert_equal((found[0][1:], found[1][1:]), wanted)


def spread_out(pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` [1, T, columns] with each column so far from the next that the last lies past 2³¹."""
    tokens, columns = numbers.shape[1:]
    gap = (1 << 31) // (columns - 1) + 1
    far = pages.as_strided((1, tokens, columns), (tokens, 1, gap))
    assert (columns - 1) * gap > 1 << 31 and (columns - 1) * gap + tokens < (PAGES - 1) * PAGE * WIDTH
    far.copy_(numbers)
    return far


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", ["latent", "k_rope", "latent_scale"])
def test_last_columns(pages: torch.Tensor, name: str, tile: Tile) -> None:
    """A cache laid out columns first, of the latent, of the rotary keys, or of the scales of groups."""
    near = problem(pages[-1:, :TOKENS].clone())
    if name == "latent_scale":
        codes = torch.randint(-127, 128, near.latent.shape, generator=torch.Generator().manual_seed(2))
        scales = torch.rand(1, TOKENS, 4, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.001
        near = dataclasses.replace(near, latent=codes.to(torch.int8), latent_scale=scales.to(torch.float16))
    far = check(dataclasses.replace(near, **{name: spread_out(pages, getattr(near, name))}))
    assert_equal(triton_decode.launch(far, tile), triton_decode.launch(near, tile))
