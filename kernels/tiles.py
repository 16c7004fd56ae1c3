"""Launch choices of the Triton decode kernel: a table by architecture and row count, guarded by arithmetic.

A row is one (new token, head) pair; a tile is ``block_rows`` of them against ``block_tokens`` of history.
"Transposed" computes scores as [tokens, rows], so that few rows still fill a matrix instruction whose
first side is fixed (WGMMA's 64). The history is divided every ``split_tokens``, whatever the load, so
that a sequence's result depends on itself alone.

Nothing here asks the hardware: a tile that would not fit gives way to a smaller one beforehand, by the shared
memory that tiles are known to take. ``make kernel-report`` compiles every tile for every architecture.
"""

from __future__ import annotations

import dataclasses

from mla_convert.errors import UsageError
from mla_convert.wording import option

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

    ``piece`` is how many of the latent's columns have products of their own, at most. ``reload_query`` loads the
    queries anew for each tile of history: AMD keeps them in registers, which wide ones fill.
    """

    block_rows: int
    block_tokens: int
    warps: int
    stages: int
    transposed: bool = False
    split_tokens: int = 1024
    piece: int = 512
    reload_query: bool = False


_ANY = 1 << 30
#: float32 products, without matrix instructions on NVIDIA; what a consumer's shared memory holds is fewer rows.
_FLOAT32 = {
    "float32": ((_ANY, Tile(16, 16, 8, 2, piece=128)),),
    "float32 coded": ((_ANY, Tile(16, 16, 8, 2, piece=64)),),
    "float32 wide": ((_ANY, Tile(16, 16, 8, 2, piece=128)),),
    "float32 wide coded": ((_ANY, Tile(16, 16, 8, 2, piece=64)),),
}
#: (rows up to, tile) by architecture and kind of problem, smallest tiles first. Kinds: what ``kind_of`` returns.
_TABLE: dict[str, dict[str, tuple[tuple[int, Tile], ...]]] = {
    "sm_80": {
        **_FLOAT32,
        "plain": (
            (16, Tile(16, 32, 4, 2, split_tokens=512)),
            (32, Tile(32, 64, 8, 2)),
            (_ANY, Tile(64, 32, 8, 2, piece=128)),
        ),
        "coded": ((16, Tile(16, 32, 8, 2, split_tokens=512, piece=128)), (_ANY, Tile(32, 32, 8, 2, piece=128))),
        "wide": ((_ANY, Tile(16, 32, 8, 2)),),
        "wide coded": ((_ANY, Tile(16, 16, 8, 2, piece=256)),),
        "float32 wide coded": ((_ANY, Tile(8, 16, 8, 2, piece=64)),),
    },
    "sm_86": {
        **_FLOAT32,
        "plain": (
            (16, Tile(16, 32, 4, 2, split_tokens=512)),
            (32, Tile(32, 32, 8, 2)),
            (_ANY, Tile(64, 16, 8, 2, piece=128)),
        ),
        "coded": ((16, Tile(16, 32, 8, 2, split_tokens=512, piece=128)), (_ANY, Tile(32, 32, 8, 2, piece=128))),
        "wide": ((_ANY, Tile(16, 16, 8, 2)),),
        "wide coded": ((_ANY, Tile(16, 16, 8, 2, piece=256)),),
        "float32 wide": ((_ANY, Tile(4, 16, 8, 2, piece=128)),),
        "float32 wide coded": ((_ANY, Tile(2, 16, 8, 2, piece=64)),),
    },
    "sm_90": {
        **_FLOAT32,
        "plain": (
            (16, Tile(16, 64, 4, 2, transposed=True, split_tokens=512)),
            (32, Tile(32, 64, 8, 2, transposed=True)),
            (_ANY, Tile(64, 32, 8, 2)),
        ),
        "coded": (
            (16, Tile(16, 32, 8, 2, split_tokens=512, piece=128)),
            (32, Tile(32, 32, 8, 2, piece=128)),
            (_ANY, Tile(64, 32, 8, 2)),
        ),
        "wide": ((16, Tile(16, 32, 8, 2)), (_ANY, Tile(32, 32, 8, 2))),
        "wide coded": ((_ANY, Tile(16, 16, 8, 2, piece=256)),),
    },
    "sm_100": {
        **_FLOAT32,
        "plain": ((16, Tile(16, 32, 4, 2, split_tokens=512)), (32, Tile(32, 32, 8, 2)), (_ANY, Tile(64, 32, 8, 2))),
        "coded": (
            (16, Tile(16, 32, 8, 2, split_tokens=512, piece=128)),
            (_ANY, Tile(64, 32, 8, 2, piece=128)),
        ),
        "wide": ((_ANY, Tile(16, 32, 8, 2)),),
        "wide coded": ((_ANY, Tile(16, 16, 8, 2, piece=256)),),
    },
    "gfx942": {
        "plain": (
            (16, Tile(16, 32, 4, 1, split_tokens=512, piece=128)),
            (32, Tile(32, 32, 4, 1, piece=128)),
            (_ANY, Tile(64, 32, 4, 1, piece=128)),
        ),
        "coded": (
            (16, Tile(16, 32, 4, 1, split_tokens=512, piece=128)),
            (_ANY, Tile(32, 32, 4, 1, piece=128, reload_query=True)),
        ),
        "wide": ((_ANY, Tile(16, 32, 4, 1, piece=128)),),
        "wide coded": ((_ANY, Tile(16, 16, 4, 1)),),
        **dict.fromkeys(_FLOAT32, ((_ANY, Tile(16, 16, 4, 1, piece=128)),)),
        "float32 wide coded": ((_ANY, Tile(16, 16, 4, 1, piece=128, reload_query=True)),),
    },
}
#: Why these problems use mma.sync where their architecture has wider instructions: up to this many rows, for this
#: reason, which the compiler gave. Everything else uses WGMMA on sm_90, and tcgen05 on sm_100 from 64 rows.
MMA_SYNC: dict[tuple[str, str], tuple[int, str]] = {
    ("sm_90", "coded"): (32, "16 or 32 rows against 64 decoded tokens, transposed, spill in the loop"),
    ("sm_90", "wide"): (
        _ANY,
        "transposed tiles spill in the loop in one stage and take 315 KB of shared memory in two; the sums of 64 rows "
        "of 1024 numbers are the whole register file",
    ),
    ("sm_90", "wide coded"): (_ANY, "transposed tiles spill in the loop, and the sums of 64 rows fill the registers"),
    ("sm_100", "wide"): (_ANY, "64 rows of 1024 numbers take 1,032 columns of tensor memory, of which there are 512"),
    ("sm_100", "wide coded"): (_ANY, "64 rows of 1024 numbers take 624 columns of tensor memory and more"),
}
_SAME_AS = {"sm_89": "sm_86", "sm_120": "sm_86", "gfx950": "gfx942"}
#: What the interpreter runs: small, so that loops and masks are exercised.
INTERPRETED = Tile(16, 16, 1, 1, split_tokens=64, piece=64)


def padded(width: int) -> int:
    """A tile's width for ``width`` numbers: the next power of two, 16 at least, which a matrix instruction takes."""
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


def shared_bytes(arch: str, tile: Tile, latent: int, rope: int, *, query_bytes: int, cache_bytes: int) -> int:
    """Shared memory that a tile takes at most.

    AMD keeps the query and, without stages, the history in registers: one piece at a time goes through shared memory.
    NVIDIA holds the query and the stages of the history, of which products from registers need one less, WGMMA all,
    and tcgen05, which runs ahead, twice as many; decoded numbers, weights, barriers and scales beside.

    Args:
        latent, rope: C and R.
        query_bytes, cache_bytes: of one number of the query (and of the rotary keys), and of the cached latent.
    """
    piece = padded(piece_width(tile, latent))
    narrow = padded(rope) if rope else 0
    rows, tokens = tile.block_rows, tile.block_tokens
    if arch.startswith("gfx"):
        return max(rows, tokens) * max(piece, narrow, tokens) * query_bytes
    wide = -(-latent // piece) * piece
    coded = cache_bytes < query_bytes
    tensor_memory = arch == "sm_100" and rows >= 64
    group_matrix = arch == "sm_90" and (rows >= 64 or tile.transposed)
    stages = tile.stages if tensor_memory or group_matrix else tile.stages - 1
    stages *= 2 if tensor_memory and not coded else 1
    history = tokens * stages * (wide * cache_bytes + narrow * query_bytes)
    decoded = tokens * wide * query_bytes if coded else 0
    small = rows * tokens * query_bytes + tokens * 64 + 1024
    return rows * (wide + narrow) * query_bytes + history + decoded + small


def kind_of(latent: int, *, query_bytes: int, cache_bytes: int) -> str:
    """The part of a table: float32 queries, latents wider than 512 and coded ones have tiles of their own."""
    named = {"float32": query_bytes == 4, "wide": latent > 512, "coded": cache_bytes < query_bytes}
    return " ".join(name for name, holds in named.items() if holds) or "plain"


def tiles_of(arch: str, kind: str) -> tuple[tuple[int, Tile], ...]:
    """(rows up to, tile) of one kind of problem, smallest first."""
    return _TABLE[_SAME_AS.get(arch, arch)][kind]


def choose_tile(arch: str, rows: int, latent: int, rope: int, *, query_bytes: int, cache_bytes: int) -> Tile:
    """The table's tile for ``rows`` rows, or the next smaller one where that would not fit ``arch``'s shared memory.

    Raises:
        UsageError: where none fits, which needs a latent or a rotary part wider than models have.
    """
    table = tiles_of(arch, kind_of(latent, query_bytes=query_bytes, cache_bytes=cache_bytes))
    chosen = next(i for i, (most, _) in enumerate(table) if rows <= most)
    for _, tile in reversed(table[: chosen + 1]):
        taken = shared_bytes(arch, tile, latent, rope, query_bytes=query_bytes, cache_bytes=cache_bytes)
        if taken <= SHARED_LIMIT[arch]:
            return tile
    raise UsageError(
        f"a latent of {latent} and a rotary part of {rope} numbers take {taken} bytes of shared memory, {arch} has "
        f"{SHARED_LIMIT[arch]}; use {option('backend', 'torch')}"
    )


def nearest_arch(major: int, minor: int) -> str:
    """The table's architecture for a CUDA compute capability, 8.0 or newer: itself, or the newest older one."""
    known = sorted((int(name[3:]), name) for name in SHARED_LIMIT if name.startswith("sm_"))
    found = [name for number, name in known if number <= 10 * major + minor]
    return found[-1]
