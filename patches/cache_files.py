"""A :class:`~mla_convert.patches.cache.LatentCache` in a file: safetensors, a tensor of rows per layer, and metadata.

``layers.N.rows`` is [B, T, width] as :class:`~mla_convert.patches.cache_rows.RowLayout` lays it out: numbers in the
model's dtype, or bytes. The metadata's entry ``latent_cache`` is JSON: the version of this format, and for each layer
the format, and C, R and the dtype where something is stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import CheckpointError, UsageError
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.latent_layer import LatentLayer
from mla_convert.paths import new_file
from mla_convert.wording import plain

_ENTRY = "latent_cache"
_VERSION = 1


def write_layers(layers: list[Any], path: str | os.PathLike[str]) -> None:
    """Write ``layers`` to a new file, whole or not at all.

    Raises:
        UsageError: the file is there already or cannot be written, or a layer is not a latent one.
    """
    target = new_file(path, "the cache's file")
    tensors: dict[str, Tensor] = {}
    described = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, LatentLayer):
            raise UsageError(
                f"layer {index} is a {type(layer).__name__}: only caches whose layers are all latent can be saved"
            )
        described.append(_describe(layer))
        if layer.rows is not None:
            tensors[f"layers.{index}.rows"] = layer.rows[:, : layer.length].detach().cpu().contiguous()
    metadata = {_ENTRY: json.dumps({"version": _VERSION, "layers": described})}
    unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(tensors, unfinished, metadata)
        os.link(unfinished, target)  # unlike a rename, this fails where the target has appeared meanwhile
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{target} cannot be written ({error}): give another place") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _describe(layer: LatentLayer) -> dict[str, Any]:
    if layer.layout is None:
        return {"format": str(layer.form)}
    layout, dtype = layer.layout, plain(layer.layout.dtype)
    return {"format": str(layout.form), "latent": layout.latent, "rope": layout.rope, "dtype": dtype}


def read_layers(path: str | os.PathLike[str], device: torch.device, capacity: int | None) -> list[LatentLayer]:
    """The layers of a file that :func:`write_layers` wrote, each with ``capacity``.

    Raises:
        CheckpointError: no such file, not one of these, or damaged.
        UsageError: more tokens are stored than ``capacity``.
    """
    try:
        with safe_open(os.fspath(path), "pt", device=str(device)) as file:
            described = _metadata(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # not a dictionary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a saved LatentCache: {error}") from error
    layers = [LatentLayer(capacity=capacity) for _ in described]
    for index, (layer, entry) in enumerate(zip(layers, described, strict=True)):
        _fill(layer, entry, tensors.pop(f"layers.{index}.rows", None), f"{path}, layer {index}")
    if tensors:
        raise CheckpointError(f"{path} holds {sorted(tensors)}, of which its metadata say nothing: save it again")
    return layers


def _metadata(path: str | os.PathLike[str], metadata: dict[str, str]) -> list[dict[str, Any]]:
    if _ENTRY not in metadata:
        raise CheckpointError(f"{path} is no saved LatentCache: it has no metadata of one")
    try:
        content = json.loads(metadata[_ENTRY])
        version, layers = content["version"], content["layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its metadata cannot be read ({error}): it is damaged, save it again") from error
    if version != _VERSION or not isinstance(layers, list):
        raise CheckpointError(f"{path} is of version {version!r}, this release reads {_VERSION}: save it again")
    return layers


def _fill(layer: LatentLayer, entry: dict[str, Any], rows: Tensor | None, where: str) -> None:
    try:
        layer.form = parse_format(entry["format"])
        if rows is None and set(entry) == {"format"}:
            return
        dtype = getattr(torch, entry["dtype"])
        layout = RowLayout(layer.form, entry["latent"], entry["rope"], dtype)
        fits = rows is not None and (rows.dim(), *rows.shape[2:], rows.dtype) == (3, layout.width, layout.stored_dtype)
    except (KeyError, TypeError, AttributeError, UsageError) as error:
        raise CheckpointError(f"{where}: the metadata do not describe it ({error}): save it again") from error
    if rows is None or not fits:
        found = "none" if rows is None else f"{list(rows.shape)} {rows.dtype}"
        raise CheckpointError(f"{where}: needs {layout.form} rows of {layout.width}, found {found}: save it again")
    if layer.capacity is not None and rows.shape[1] > layer.capacity:
        raise UsageError(f"{where} holds {rows.shape[1]} tokens, more than the capacity of {layer.capacity}")
    layer.adopt_rows(rows, layout)
