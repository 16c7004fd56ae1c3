"""The launch table: every row count gets a tile that fits, and its arithmetic holds together."""

from __future__ import annotations

import itertools

import pytest

from mla_convert.errors import UsageError
from mla_convert.kernels.tiles import (
    INTERPRETED,
    SHARED_LIMIT,
    Tile,
    choose_tile,
    kind_of,
    nearest_arch,
    padded,
    piece_width,
    shared_bytes,
    tiles_of,
)

KINDS = [kind_of(latent, query_bytes=q, cache_bytes=c) for latent in (512, 1024) for q in (2, 4) for c in {1, q}]
ALL_TILES = [(arch, kind, tile) for arch in SHARED_LIMIT for kind in KINDS for _, tile in tiles_of(arch, kind)]


def test_kinds() -> None:
    assert sorted(KINDS) == [
        "coded",
        "float32",
        "float32 coded",
        "float32 wide",
        "float32 wide coded",
        "plain",
        "wide",
        "wide coded",
    ]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_problem_gets_a_tile_that_fits(arch: str) -> None:
    widths = (64, 96, 128, 192, 256, 512, 576, 1024)
    for latent, rope, query in itertools.product(widths, (0, 16, 32, 64), (2, 4)):
        for cache in (query, 1):
            for rows in range(1, 2049, 1 if (latent, rope) == (512, 64) else 61):
                tile = choose_tile(arch, rows, latent, rope, query_bytes=query, cache_bytes=cache)
                taken = shared_bytes(arch, tile, latent, rope, query_bytes=query, cache_bytes=cache)
                assert taken <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_never_get_a_smaller_tile(arch: str, kind: str) -> None:
    table = tiles_of(arch, kind)
    thresholds, sizes = [most for most, _ in table], [tile.block_rows for _, tile in table]
    assert thresholds == sorted(set(thresholds)) and sizes == sorted(sizes)
    assert thresholds[-1] >= 2048 * 128
    assert all(size >= most for most, size in zip(thresholds[:-1], sizes, strict=False))


@pytest.mark.parametrize(("arch", "kind", "tile"), [*ALL_TILES, ("", "", INTERPRETED)], ids=str)
def test_a_tile_is_one_that_can_run(arch: str, kind: str, tile: Tile) -> None:
    """Powers of two; parts of the history end between tiles, so that a tile never reaches into the next part."""
    for number in (tile.block_rows, tile.block_tokens, tile.warps, tile.piece):
        assert number & (number - 1) == 0
    assert tile.block_tokens >= 16 and tile.piece >= 16 and tile.stages >= 1
    assert tile.split_tokens % tile.block_tokens == 0


def test_a_tile_that_does_not_fit_gives_way_to_a_smaller_one() -> None:
    ordinary = choose_tile("sm_86", 128, 512, 64, query_bytes=2, cache_bytes=2)
    wider = choose_tile("sm_86", 128, 512, 256, query_bytes=2, cache_bytes=2)
    assert (ordinary.block_rows, wider.block_rows) == (64, 16)
    with pytest.raises(UsageError, match="use backend='torch'"):
        choose_tile("sm_86", 128, 4096, 64, query_bytes=2, cache_bytes=2)


@pytest.mark.parametrize(
    ("latent", "group", "piece", "width"),
    [
        (512, 0, 512, 512),
        (512, 0, 128, 128),
        (64, 0, 512, 64),
        (192, 0, 512, 64),
        (576, 0, 128, 64),
        (1024, 0, 512, 512),
        (512, 128, 512, 128),
        (512, 128, 64, 64),
        (192, 48, 512, 48),
        (576, 288, 128, 96),
        (512, 512, 128, 128),
    ],
)
def test_pieces(latent: int, group: int, piece: int, width: int) -> None:
    found = piece_width(Tile(16, 16, 4, 1, piece=piece), latent, group)
    assert found == width and found <= piece
    assert not group or group % found == 0 or group == latent


def test_padding() -> None:
    assert [padded(width) for width in (1, 16, 17, 48, 64, 192, 512, 513)] == [16, 16, 32, 64, 64, 256, 512, 1024]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_nearest_architecture(capability: tuple[int, int], arch: str) -> None:
    assert nearest_arch(*capability) == arch
