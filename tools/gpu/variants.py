"""Tiles that the table could have, side by side with the one that it has."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from gpu import timing
from gpu.decode import cache_bytes, operations, problems
from gpu.setting import CPU, DTYPE, LATENT, ROPE, Shape, arch
from mla_convert.kernels import tiles, triton_decode
from mla_convert.kernels.tiles import Tile

_KEPT: dict[Shape, Any] = {}


def chosen_for(shape: Shape) -> Tile:
    """The table's tile."""
    if CPU:
        return tiles.INTERPRETED
    sizes = {"query_bytes": DTYPE.itemsize, "cache_bytes": 1 if shape.codes else DTYPE.itemsize}
    return tiles.choose_tile(arch(), shape.rows, LATENT, ROPE, **sizes)


def near(shape: Shape) -> list[Tile]:
    """The table's tile, and those that differ from it in one choice."""
    tile = chosen_for(shape)
    changes: dict[str, tuple[Any, ...]] = {
        "block_rows": (16, 32, 64),
        "block_tokens": (16, 32, 64),
        "warps": (4, 8),
        "stages": (1, 2, 3),
        "transposed": (False, True),
        "split_tokens": (256, 512, 1024, 2048, 4096),
        "piece": (128, 256, 512),
    }
    others = [dataclasses.replace(tile, **{name: value}) for name, values in changes.items() for value in values]
    return [tile, *(other for other in dict.fromkeys(others) if other != tile and fits(shape, other))]


def far(shape: Shape) -> list[Tile]:
    """The remaining combinations of rows, tokens, warps and orientation."""
    tile, seen = chosen_for(shape), set(near(shape))
    every = itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (False, True))
    made = [
        dataclasses.replace(tile, block_rows=rows, block_tokens=tokens, warps=warps, transposed=turned)
        for rows, tokens, warps, turned in every
    ]
    return [other for other in made if other not in seen and fits(shape, other)]


def fits(shape: Shape, tile: Tile) -> bool:
    """Whether the tile's shared memory is there, by arithmetic."""
    sizes = {"query_bytes": DTYPE.itemsize, "cache_bytes": 1 if shape.codes else DTYPE.itemsize}
    return tiles.shared_bytes(arch(), tile, LATENT, ROPE, **sizes) <= tiles.SHARED_LIMIT[arch()]


def name_of(shape: Shape, tile: Tile) -> str:
    """An entry's name."""
    turned = " transposed" if tile.transposed else ""
    size = f"{tile.block_rows}x{tile.block_tokens} w{tile.warps} s{tile.stages}"
    return f"tile {shape}: {size} split{tile.split_tokens} piece{tile.piece}{turned}"


def measure(shape: Shape, tile: Tile, tops: dict[str, float]) -> dict[str, Any]:
    """One tile on one shape; the problems are kept for the next tile."""
    if shape not in _KEPT:
        _KEPT.clear()
        _KEPT[shape] = problems(shape)
    calls = [lambda args=args: triton_decode.launch(args, tile) for args in _KEPT[shape]]
    # Replayed: at short histories a launch takes the CPU longer than the GPU, and all tiles would seem alike.
    elapsed = timing.seconds(calls, graph=True)
    found: dict[str, Any] = timing.rates(elapsed, read=cache_bytes(shape), operations=operations(shape), tops=tops)
    return found | {"shape": str(shape), "table": tile == chosen_for(shape)}


def advice(entries: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each shape of which tiles were timed: the table's tile, the fastest, and how much faster that is."""
    timed = {name: entry for name, entry in entries.items() if name.startswith("tile ") and "seconds" in entry}
    for shape in dict.fromkeys(entry["shape"] for entry in timed.values()):
        group = {name: entry for name, entry in timed.items() if entry["shape"] == shape}
        table = next((name for name, entry in group.items() if entry["table"]), None)
        if table is not None:
            best = min(group, key=lambda name: group[name]["seconds"])
            gain = group[table]["seconds"] / group[best]["seconds"]
            row = {"table": table.split(": ")[1], "fastest": best.split(": ")[1], "times_faster": gain}
            yield shape, row | {"tiles": len(group)}
