"""What a checkpoint's folder holds: which of the three layouts, and every tensor's place, under Hugging Face names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from mla_convert import native
from mla_convert.destination import MANIFEST
from mla_convert.errors import CheckpointError
from mla_convert.hub import is_hub_id, open_repository
from mla_convert.hub_prefetch import prefetch_beginnings
from mla_convert.shards import Piece, is_readable, parse_json, read_header

Layout = Literal["single", "sharded", "native"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth")
_MOST_PARTS = 4096
_NO_GGUF = (
    "llama.cpp's files are not read: take the repository that they were made from, in safetensors with a config.json "
    "(their model card names it as base_model)"
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One logical tensor: ``pieces`` joined along ``axis``, or, where ``axis`` is None, equal copies of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    axis: int | None = None


def open_folder(path: pathlib.Path) -> pathlib.Path:
    """The folder ``path``, or the hub repository of that name where there is none.

    CheckpointError where it is neither, with what it looks like instead.
    """
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} is a GGUF file; {_NO_GGUF}")
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds it and the config.json")
    if is_hub_id(path.as_posix()):
        return open_repository(path.as_posix())
    raise CheckpointError(f"there is no folder {path}; give the folder with the checkpoint's config.json")


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The folder's config.json as it is."""
    file = path / "config.json"
    if not is_readable(file):
        otherwise = "take the one that belongs to the model"
        raise CheckpointError(f"{path} has no config.json; {_instead(path) or otherwise}")
    return parse_json(file.read_bytes(), what=str(file), hint="correct it, or take the one that belongs to the model")


def read_modelopt(path: pathlib.Path) -> dict[str, Any] | None:
    """ModelOpt's own file, where the folder has it."""
    file = path / "hf_quant_config.json"
    if not is_readable(file):
        return None
    return parse_json(file.read_bytes(), what=str(file), hint="take the one that belongs to the checkpoint")


def find_tensors(path: pathlib.Path) -> tuple[Layout, dict[str, Stored]]:
    """The folder's layout and its tensors under Hugging Face names; only headers are read."""
    parts = sorted(file for file in path.iterdir() if native.PART_FILE.fullmatch(file.name))
    single, index = path / SINGLE, path / INDEX
    if parts and (single.exists() or index.exists()):
        raise CheckpointError(
            f"{path} holds both DeepSeek-native parts ({parts[0].name}, …) and Hugging Face weights; "
            "move one of them into a folder of its own, with its config.json"
        )
    if parts:
        return "native", _native(path, parts)
    if index.exists():
        return "sharded", _sharded(path, index)
    if single.exists() or single.is_symlink():
        return "single", _whole(_headers([single]))
    raise CheckpointError(f"{path} has no weights that can be read; {_instead(path) or _lone_shards(path)}")


def _headers(files: Iterable[pathlib.Path]) -> dict[pathlib.Path, dict[str, Piece]]:
    listed = list(files)
    prefetch_beginnings(listed)
    return {file: read_header(file) for file in listed}


def _whole(headers: Mapping[pathlib.Path, dict[str, Piece]]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file, pieces in headers.items():
        for name, piece in pieces.items():
            if name in tensors:
                other = tensors[name].pieces[0].file.name
                raise CheckpointError(f"{name} is in two files, {other} and {file.name}; remove the file that is wrong")
            tensors[name] = Stored(name, piece.shape, piece.dtype, (piece,))
    return tensors


def _sharded(path: pathlib.Path, index: pathlib.Path) -> dict[str, Stored]:
    again = "fetch the index again"
    where = parse_json(index.read_bytes(), what=str(index), hint=again).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{index} has no weight_map; {again}")
    names = sorted({_inside(index, name) for name in where.values()})
    if (path / SINGLE).exists() and names != [SINGLE]:
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX} with {len(names)} shards; transformers uses {SINGLE} and ignores "
            f"the shards: remove {SINGLE}, or the index with its shards"
        )
    _refuse_missing(path, names, f"named in {INDEX}")
    headers = _headers(path / name for name in names)
    for name, file in where.items():
        if name not in headers[path / file]:
            raise CheckpointError(f"{INDEX} places {name} in {file}, but that file does not have it; fetch both again")
    return _whole(headers)


def _inside(index: pathlib.Path, name: Any) -> str:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names the file {name!r}; supported are safetensors: fetch the index again")
    # Both kinds of path, so that a hostile index is refused alike on every system.
    kinds = pathlib.PurePosixPath(name), pathlib.PureWindowsPath(name)
    if any(kind.is_absolute() or kind.drive or ".." in kind.parts for kind in kinds):
        raise CheckpointError(f"{index} names {name!r}, outside its own folder; such an index is not read")
    return name


def _refuse_missing(path: pathlib.Path, names: Iterable[str], why: str) -> None:
    missing = [name for name in names if not is_readable(path / name)]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, {why}; fetch what is missing")


def _native(path: pathlib.Path, files: list[pathlib.Path]) -> dict[str, Stored]:
    names = _part_names(path, files)
    _refuse_missing(path, names, f"of the {len(names)} parts")
    found: dict[str, list[Piece]] = {}
    for pieces in _headers(path / name for name in names).values():
        for name, piece in pieces.items():
            found.setdefault(name, []).append(piece)
    return {tensor.name: tensor for tensor in (_join(name, pieces, names) for name, pieces in found.items())}


def _part_names(path: pathlib.Path, files: list[pathlib.Path]) -> list[str]:
    """File names of a whole split, from the parts that are there."""
    numbers = {file.name: tuple(map(int, native.PART_FILE.sub(r"\1 \2", file.name).split())) for file in files}
    counts = sorted({count for _, count in numbers.values()})
    if len(counts) > 1:
        found = ", ".join(f"mp{count}" for count in counts)
        raise CheckpointError(f"{path} holds parts of several splits ({found}); keep one of them")
    (count,) = counts
    surplus = [name for name, (part, _) in numbers.items() if part >= count or name != _part_name(part, count)]
    if surplus:
        raise CheckpointError(f"{path} holds {', '.join(surplus)}, which is no part of a split into {count}; remove it")
    if count > _MOST_PARTS:
        raise CheckpointError(f"{path} holds a part of a split into {count}; supported are up to {_MOST_PARTS}")
    return [_part_name(part, count) for part in range(count)]


def _part_name(part: int, count: int) -> str:
    return f"model{part}-mp{count}.safetensors"


def _join(name: str, pieces: list[Piece], files: list[str]) -> Stored:
    ours, placement = native.hf_name(name)
    first = pieces[0]
    if placement == "one part":
        if len(pieces) > 1:
            raise CheckpointError(
                f"{name} is in {len(pieces)} of the parts, and an expert belongs to one; the parts are not of one split"
            )
        return Stored(ours, first.shape, first.dtype, (first,))
    if len(pieces) < len(files):
        missing = sorted(set(files) - {piece.file.name for piece in pieces})
        raise CheckpointError(f"{name} is missing in {', '.join(missing)}; the parts are not of one split")
    axis = None if placement == "copies" else placement
    _check_alike(name, pieces, axis)
    if axis is None:
        return Stored(ours, first.shape, first.dtype, tuple(pieces))
    length = sum(piece.shape[axis] for piece in pieces)
    return Stored(ours, (*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype, tuple(pieces), axis=axis)


def _check_alike(name: str, pieces: list[Piece], axis: int | None) -> None:
    first = pieces[0]
    if axis is not None and len(first.shape) <= axis:
        raise CheckpointError(f"{name} has shape {list(first.shape)}; its parts are joined along axis {axis}")
    for piece in pieces:
        kept = [size for i, size in enumerate(piece.shape) if i != axis]
        if kept != [size for i, size in enumerate(first.shape) if i != axis] or piece.dtype != first.dtype:
            raise CheckpointError(
                f"{name} has shape {list(first.shape)} ({first.dtype}) in {first.file.name} and {list(piece.shape)} "
                f"({piece.dtype}) in {piece.file.name}; the parts are not of one split"
            )


def _instead(path: pathlib.Path) -> str:
    """What a folder without a readable checkpoint holds instead, and what to do; nothing where that is not plain."""
    files = sorted(file.name for file in path.iterdir())
    if any(name.endswith(".gguf") for name in files):
        return f"it holds GGUF files; {_NO_GGUF}"
    if any(name.endswith(_PICKLED) and name.startswith(("pytorch_model", "model", "consolidated")) for name in files):
        return (
            "it holds pickled weights, which can run code when they are read and are not supported: save the model "
            "again with save_pretrained, which writes safetensors"
        )
    if MANIFEST in files:
        return "it holds absorbed weights and no model: give the checkpoint that they belong to, and this folder second"
    return "" if files else "the folder is empty: give the one that holds the checkpoint"


def _lone_shards(path: pathlib.Path) -> str:
    shards = sorted(file.name for file in path.iterdir() if file.name.endswith(".safetensors"))
    found = f"it holds {shards[0]}{', …' if shards[1:] else ''}: " if shards else ""
    return f"{found}needed are {SINGLE}, or {INDEX} with its shards, or DeepSeek's model0-mp1.safetensors, …"
