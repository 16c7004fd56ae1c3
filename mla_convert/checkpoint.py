"""Read a checkpoint's tensors by name, lazily, whatever its layout and quantization."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import pathlib
import re
from typing import Any

import torch

from mla_convert.architectures import Family, LayerSpec, find_family, layer_spec, layer_specs, normalize_config
from mla_convert.errors import CheckpointError, FormatError
from mla_convert.folders import Layout, Stored, find_tensors, open_folder, read_config
from mla_convert.formats import (
    FP8,
    SCALE_SUFFIX,
    Fp8Blocks,
    count_nonfinite,
    dequantize_fp8_blocks,
    parse_quantization,
    refuse_nonfinite,
    refuse_overflow,
)
from mla_convert.integrity import check_layers, check_scales
from mla_convert.paths import path_of, reading
from mla_convert.shards import read_piece


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the headers say of one tensor: its shape (native parts joined), dtype as stored, and files."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: tuple[str, ...]


class Checkpoint:
    """A checkpoint on disk: one ``model.safetensors``, shards with an index, or DeepSeek-native parts.

    Names are Hugging Face's in every layout. Opening reads the config and the files' headers and checks them against
    each other; tensors are read when asked for, each alone. No file is kept open, so that a checkpoint can be pickled
    and used from several threads.
    """

    path: pathlib.Path
    layout: Layout
    #: config.json as it is, and as transformers' config class takes it for the plain weights of :meth:`state_dict`:
    #: Hugging Face keys, ``rope_parameters``, and no ``quantization_config`` (see ``quantization``).
    raw_config: dict[str, Any]
    config: dict[str, Any]
    family: Family
    layers: tuple[LayerSpec, ...]
    #: Multi-token-prediction layers beyond ``num_hidden_layers`` that the files hold; transformers leaves them out.
    extra_layers: tuple[LayerSpec, ...]
    quantization: Fp8Blocks | None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the checkpoint in the folder ``path``.

        Raises UnsupportedModelError for a model that is not one of the supported families, FormatError for weights
        stored in a form that cannot be read, and CheckpointError for anything missing, damaged or contradictory.
        """
        return cls(path_of(path, "SOURCE"))

    def __init__(self, path: pathlib.Path) -> None:
        with reading(path, CheckpointError, "check its rights, or fetch it again"):
            self._open(path)

    def _open(self, path: pathlib.Path) -> None:
        open_folder(path)
        self.path = path
        self.raw_config = read_config(path)
        self.config = normalize_config(self.raw_config)
        self.family = find_family(self.config)
        self.layers = layer_specs(self.config)
        self.quantization = _quantization(path, self.config)
        for key in ("quantization_config", "compression_config"):
            self.config.pop(key, None)
        self._default_dtype = _config_dtype(self.config)
        self.layout, self._tensors = find_tensors(path)
        self.extra_layers = self._find_extra_layers()
        check_layers(self._tensors, (*self.layers, *self.extra_layers))
        check_scales(self._tensors, self.quantization)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.family.model_type} {self.layout}, {len(self._tensors)} tensors, {str(self.path)!r}>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held open; ``with`` only bounds the use."""

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Names of all tensors, scales included, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape, stored dtype and files of one tensor, without reading it."""
        tensor = self._find(name)
        files = tuple(dict.fromkeys(piece.file.name for piece in tensor.pieces))
        return TensorInfo(name, tensor.shape, tensor.dtype, files)

    def quantized(self, name: str) -> bool:
        """Whether the tensor is stored as FP8 codes."""
        return self._find(name).dtype == FP8

    def scale_name(self, name: str) -> str | None:
        """Name of the scale that belongs to a tensor stored as codes; None for others."""
        return name + SCALE_SUFFIX if self.quantized(name) else None

    def source_dtype(self, name: str) -> torch.dtype:
        """Dtype of the logical weight: the config's for one stored as codes, else the stored one."""
        tensor = self._find(name)
        return self._default_dtype if tensor.dtype == FP8 else tensor.dtype

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored (codes as codes), native parts joined, in memory of its own.

        Copies that must be equal in all native parts are compared; CheckpointError where they differ.
        """
        tensor = self._find(name)
        if tensor.axis is not None:
            return torch.cat([_raw(read_piece(piece)) for piece in tensor.pieces], tensor.axis).view(tensor.dtype)
        first = read_piece(tensor.pieces[0])
        for piece in tensor.pieces[1:]:
            if not torch.equal(_raw(first), _raw(read_piece(piece))):
                raise CheckpointError(
                    f"{name} differs between {tensor.pieces[0].file.name} and {piece.file.name}, which each hold a "
                    "whole copy of it; the parts are not of one checkpoint: fetch or split it again"
                )
        return first

    def weight(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor's logical values in ``dtype`` (by default :meth:`source_dtype`).

        FP8 blocks are multiplied by their scales in float32 and rounded once. FormatError where a value is NaN or
        infinite, as stored or because ``dtype`` cannot hold it; integer tensors come as they are.
        """
        tensor = self._find(name)
        if name.endswith(SCALE_SUFFIX):
            raise FormatError(f"{name} is a scale, not a weight; read() gives it as stored")
        if tensor.dtype == FP8:
            assert self.quantization is not None  # held by check_scales
            return dequantize_fp8_blocks(
                self.read(name),
                self.read(name + SCALE_SUFFIX),
                self.quantization.block_size,
                dtype or self._default_dtype,
                name=name,
            )
        stored = self.read(name)
        if not stored.is_floating_point():
            return stored
        refuse_nonfinite(name, count_nonfinite(stored), stored.numel(), stored.dtype)
        values = stored if dtype is None else stored.to(dtype)
        refuse_overflow(name, count_nonfinite(values), values.numel(), values.dtype)
        return values

    def digest(self, name: str) -> str:
        """SHA-256, in hex, of the tensor's bytes as stored, row-major, native parts joined; scales have their own."""
        return tensor_digest(self.read(name))

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All weights in plain numbers under Hugging Face names, without scales, as :meth:`weight` gives each.

        Goes with ``config``: ``Class.from_pretrained(None, config=Class.config_class(**checkpoint.config),
        state_dict=checkpoint.state_dict(dtype), dtype=dtype)``. Without its own ``dtype``, ``from_pretrained`` casts
        everything to the config's.
        """
        return {name: self.weight(name, dtype) for name in self.names() if not name.endswith(SCALE_SUFFIX)}

    def _find(self, name: str) -> Stored:
        if name not in self._tensors:
            near = difflib.get_close_matches(name, self._tensors, n=1)
            raise CheckpointError(f"{self.path} has no tensor {name}{f'; did you mean {near[0]}?' if near else ''}")
        return self._tensors[name]

    def _find_extra_layers(self) -> tuple[LayerSpec, ...]:
        pattern = re.escape(layer_spec(self.config, 0).kv_b).replace(r"\.0\.", r"\.(\d+)\.")
        found = (re.fullmatch(pattern, name) for name in self._tensors)
        indices = sorted(int(match.group(1)) for match in found if match)
        return tuple(layer_spec(self.config, index) for index in indices if index >= len(self.layers))


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256, in hex, of a CPU tensor's bytes in row-major order, whatever its dtype and strides."""
    return hashlib.sha256(_raw(tensor.contiguous()).reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, which every operation of PyTorch takes; equality then also holds for NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def _quantization(path: pathlib.Path, config: dict[str, Any]) -> Fp8Blocks | None:
    blocks = parse_quantization(config)
    if blocks is None and (path / "hf_quant_config.json").exists():
        raise FormatError(
            f"{path} has a hf_quant_config.json (ModelOpt); supported are plain weights and FP8 blocks: "
            "take the checkpoint in one of these forms"
        )
    return blocks


def _config_dtype(config: dict[str, Any]) -> torch.dtype:
    """The config's dtype; bfloat16 without one, the dtype that every public FP8 checkpoint was trained in."""
    name = config.get("dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise FormatError(f"the config gives dtype = {name!r}; supported are float32, bfloat16 and float16")
    return dtype
