"""Launch choices of the Triton decode kernel: a table by architecture and row count, guarded by arithmetic.

A row is one (new token, head) pair; a tile is ``block_rows`` of them against ``block_tokens`` of history.
"Transposed" computes scores as [tokens, rows], so that few rows still fill a matrix instruction whose
first side is fixed (WGMMA's 64). The history is divided every ``split_tokens``, whatever the load, so
that a sequence's result depends on itself alone.

Nothing here asks the hardware: a launch that would not fit is made smaller beforehand, by the shared
memory that the kernel's tiles are known to take.
"""

from __future__ import annotations

import dataclasses

#: Shared memory a block may use, in bytes.
SHARED_LIMIT = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """One launch: see the module. ``warps`` and ``stages`` are Triton's num_warps and num_stages.

    ``piece`` is how many of the latent's columns have products of their own, at most.
    """

    block_rows: int
    block_tokens: int
    warps: int
    stages: int
    transposed: bool = False
    split_tokens: int = 1024
    piece: int = 512


#: For each architecture: (rows up to, tile), the last entry for everything above.
_TABLE: dict[str, tuple[tuple[int, Tile], ...]] = {
    "sm_80": (
        (16, Tile(16, 32, 4, 2, split_tokens=512)),
        (32, Tile(32, 64, 8, 2)),
        (1 << 30, Tile(64, 16, 8, 2)),
    ),
    "sm_86": (
        (16, Tile(16, 32, 4, 2, split_tokens=512)),
        (32, Tile(32, 32, 8, 2)),
        (1 << 30, Tile(64, 16, 8, 2)),
    ),
    "sm_90": (
        (16, Tile(16, 64, 4, 2, transposed=True, split_tokens=512)),
        (32, Tile(32, 64, 8, 2, transposed=True)),
        (1 << 30, Tile(64, 32, 8, 2)),
    ),
    "sm_100": (
        (16, Tile(16, 32, 4, 2, split_tokens=512)),
        (32, Tile(32, 32, 8, 2)),
        (1 << 30, Tile(64, 64, 8, 2)),
    ),
    "gfx942": (
        (16, Tile(16, 32, 4, 1, split_tokens=512)),
        (32, Tile(32, 32, 4, 1)),
        (1 << 30, Tile(64, 32, 4, 1)),
    ),
}
_SAME_AS = {"sm_89": "sm_86", "sm_120": "sm_86", "gfx950": "gfx942"}
#: What the interpreter runs: small, so that loops and masks are exercised.
INTERPRETED = Tile(16, 16, 1, 1, split_tokens=64, piece=64)


def padded(width: int) -> int:
    """A tile's width for ``width`` numbers: the next power of two, 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def piece_width(tile: Tile, latent: int, group: int = 0) -> int:
    """Columns of one piece of a latent: those that waste least, inside one group of ``group`` numbers (0: no groups).

    A piece takes the room of the next power of two.
    """
    if 0 < group < latent:
        parts = next(n for n in range(-(-group // tile.piece), group + 1) if group % n == 0)
        return group // parts
    widths = [tile.piece >> n for n in range(6) if tile.piece >> n >= 16]
    return min(widths, key=lambda width: (-(-latent // width) * width, -width))


def shared_bytes(tile: Tile, latent: int, rope: int, *, query_bytes: int, cache_bytes: int) -> int:
    """Shared memory that a tile may take at most: the query, and each stage's rows of history.

    Args:
        latent, rope: C and R.
        query_bytes, cache_bytes: of one number of the query (and of the rotary keys), and of the cached latent.
    """
    wide, narrow = padded(latent), padded(rope) if rope else 0
    query = tile.block_rows * (wide + narrow) * query_bytes
    stage = tile.block_tokens * (wide * cache_bytes + narrow * query_bytes)
    decoded = tile.block_tokens * wide * query_bytes if cache_bytes < query_bytes else 0
    weights = tile.block_rows * tile.block_tokens * query_bytes
    return query + stage * max(1, tile.stages) + decoded + weights


def choose_tile(arch: str, rows: int, latent: int, rope: int, *, query_bytes: int, cache_bytes: int) -> Tile:
    """The table's tile for ``rows`` rows, made smaller until it fits ``arch``'s shared memory.

    Stages go first, then tokens, then rows; ``split_tokens`` never changes with any of them.
    """
    table = _TABLE[_SAME_AS.get(arch, arch)]
    tile = next(tile for most, tile in table if rows <= most)
    # float32 products and latents wider than the table was made for need room in registers as well.
    if query_bytes == 4 or latent > 512:
        tile = dataclasses.replace(tile, block_rows=16, block_tokens=16, warps=8, stages=1, transposed=False)
    while shared_bytes(tile, latent, rope, query_bytes=query_bytes, cache_bytes=cache_bytes) > SHARED_LIMIT[arch]:
        if tile.stages > 1:
            tile = dataclasses.replace(tile, stages=tile.stages - 1)
        elif tile.block_tokens > 16:
            tile = dataclasses.replace(tile, block_tokens=tile.block_tokens // 2)
        else:
            assert tile.block_rows > 16, f"no tile fits {arch}: C {latent}, R {rope}"
            tile = dataclasses.replace(tile, block_rows=tile.block_rows // 2)
    return tile


def nearest_arch(major: int, minor: int) -> str:
    """The table's architecture for a CUDA compute capability: itself, or the newest older one."""
    known = sorted((int(name[3:]), name) for name in SHARED_LIMIT if name.startswith("sm_"))
    found = [name for number, name in known if number <= 10 * major + minor]
    return found[-1] if found else "sm_80"
