"""Read a checkpoint's tensors by name, lazily, whatever its layout and quantization."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mla_convert.architectures import Family, LayerSpec, extra_layers, find_family, layer_specs, normalize_config
from mla_convert.digest import as_integers, tensor_digest
from mla_convert.errors import CheckpointError, FormatError
from mla_convert.folders import Layout, Stored, find_tensors, open_folder, read_config, read_modelopt
from mla_convert.formats import config_dtype, count_nonfinite, refuse_nonfinite, refuse_overflow
from mla_convert.hub import HubPath
from mla_convert.integrity import check_layers
from mla_convert.paths import reading, source_of
from mla_convert.quantization_config import parse_quantization
from mla_convert.quantized import find_quantized, said_of, split_name
from mla_convert.readers import Codes
from mla_convert.shards import Piece, read_piece
from mla_convert.source_schemes import Quantization, SourceScheme


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the headers say of one tensor: its shape (native parts joined), dtype as stored, and files.

    Of a weight that is stored in codes: the weight's own shape, the codes' dtype, and the files of all its parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: tuple[str, ...]


class Checkpoint:
    """A checkpoint: one ``model.safetensors``, shards with an index, or DeepSeek-native parts.

    It is a folder, or a repository on the hub (``path`` is then a :class:`mla_convert.hub.HubPath`) of which nothing is
    read but the headers and the tensors asked for.

    Names are Hugging Face's in every layout, and a weight that is stored in codes has the name that it would have
    without them (``module.weight``), whatever its parts are called. Opening reads the config and the files' headers
    and checks them against each other; tensors are read when asked for, each alone. No file is kept open, so that a
    checkpoint can be pickled and used from several threads.
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
    quantization: Quantization | None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the checkpoint in the folder ``path``, or in the hub repository ``org/name[@revision]``.

        Raises UnsupportedModelError for a model that is not one of the supported families, FormatError for weights
        stored in a form that cannot be read, and CheckpointError for anything missing, damaged or contradictory.
        """
        return cls(source_of(path))

    def __init__(self, path: pathlib.Path) -> None:
        with reading(path, CheckpointError, "check its rights, or fetch it again"):
            self._open(path)

    def _open(self, path: pathlib.Path) -> None:
        path = open_folder(path)
        self.path = path
        self.raw_config = read_config(path)
        self.config = normalize_config(self.raw_config)
        self.family = find_family(self.config)
        layer_specs(self.config)  # what the config alone rules out is said before any file is opened
        self.quantization = parse_quantization(self.raw_config | self.config, read_modelopt(path))
        for key in ("quantization_config", "compression_config"):
            self.config.pop(key, None)
        self._default_dtype = config_dtype(self.config)
        self.layout, self._tensors = find_tensors(path)
        modules = {split_name(name)[0] for name in self._tensors}
        self.layers = layer_specs(self.config, modules)
        self.extra_layers = extra_layers(self.layers, modules)
        layers = (*self.layers, *self.extra_layers)
        shapes = {name: shape for layer in layers for name, shape in layer.shapes().items()}
        self._quantized, self._beside = find_quantized(self._tensors, self.quantization, shapes)
        check_layers(self._tensors, self._quantized, self.quantization, layers)
        self._metadata = said_of(self._tensors, self.quantization)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.family.model_type} {self.layout}, {len(self._tensors)} tensors, {str(self.path)!r}>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held open; ``with`` only bounds the use."""

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._quantized

    def names(self) -> list[str]:
        """Names of all tensors as they are stored, scales and other parts included, sorted."""
        return sorted(self._tensors)

    def weight_names(self) -> list[str]:
        """Names of everything that :meth:`weight` gives, sorted."""
        parts = {part.name for weight in self._quantized.values() for part in weight.tensors.values()}
        return sorted({*self._quantized, *(self._tensors.keys() - parts - self._beside)})

    def info(self, name: str) -> TensorInfo:
        """Shape, stored dtype and files of one tensor, without reading it."""
        tensor = self._find(name)
        weight = self._quantized.get(name)
        tensors = [tensor] if weight is None else [tensor, *weight.companions.values()]
        files = tuple(dict.fromkeys(piece.file.name for each in tensors for piece in each.pieces))
        return TensorInfo(name, tensor.shape if weight is None else weight.shape, tensor.dtype, files)

    def quantized(self, name: str) -> bool:
        """Whether the tensor is a weight that is stored in codes."""
        return self.scheme(name) is not None

    def scheme(self, name: str) -> SourceScheme | None:
        """How a weight is stored in codes; None for others."""
        self._find(name)
        return self._quantized[name].scheme if name in self._quantized else None

    def companions(self, name: str) -> tuple[str, ...]:
        """Names, as stored, of what belongs to a weight's codes: scales, zero points, an order; none for others."""
        self._find(name)
        weight = self._quantized.get(name)
        return () if weight is None else tuple(tensor.name for tensor in weight.companions.values())

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor as stored, with everything that belongs to it."""
        tensors = [self._find(each) for each in (name, *self.companions(name))]
        return sum(torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for tensor in tensors)

    def bytes_to_fetch(self, names: Iterable[str]) -> int:
        """Bytes that reading these tensors brings from the hub, to stay; none for folders, and what was read before."""
        tensors = [self._find(each) for name in names for each in (name, *self.companions(name))]
        places = {(piece.file, piece.start, piece.nbytes) for tensor in tensors for piece in tensor.pieces}
        return sum(file.missing(start, nbytes) for file, start, nbytes in places if isinstance(file, HubPath))

    def source_dtype(self, name: str) -> torch.dtype:
        """Dtype of the logical weight: the config's for one stored in codes, else the stored one."""
        tensor = self._find(name)
        return self._default_dtype if name in self._quantized else tensor.dtype

    def read(self, name: str, memory: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """The tensor as stored (codes as codes), native parts joined, in memory of its own.

        ``memory`` gives memory for so many bytes, uint8, that is used where nothing has to be joined.
        Copies that must be equal in all native parts are compared; CheckpointError where they differ.
        """
        tensor = self._find(name)
        if tensor.axis is not None:
            return torch.cat([as_integers(read_piece(piece)) for piece in tensor.pieces], tensor.axis).view(
                tensor.dtype
            )
        first = read_piece(tensor.pieces[0], memory)
        for piece in tensor.pieces[1:]:
            if not torch.equal(as_integers(first), as_integers(read_piece(piece))):
                raise CheckpointError(
                    f"{name} differs between {tensor.pieces[0].file.name} and {piece.file.name}, which each hold a "
                    "whole copy of it; the parts are not of one checkpoint: fetch or split it again"
                )
        return first

    def piece(self, name: str) -> Piece | None:
        """Where a tensor of plain numbers stands, if that is one place on disk; else None."""
        pieces = self._find(name).pieces
        alone = len(pieces) == 1 and name not in self._quantized and not isinstance(pieces[0].file, HubPath)
        return pieces[0] if alone else None

    def weight(self, name: str, dtype: torch.dtype | None = None, stored: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor's logical values in ``dtype`` (by default :meth:`source_dtype`).

        ``stored`` is what :meth:`read` gave for a tensor that is not in codes, where it has been read already.

        Codes are multiplied by their scales in float32 and rounded once. FormatError where a value is NaN or infinite,
        as stored or because ``dtype`` cannot hold it; integer tensors come as they are.
        """
        tensor = self._find(name)
        if name in self._beside:
            raise FormatError(f"{name} is a scale, not a weight; read() gives it as stored")
        weight = self._quantized.get(name)
        if weight is not None:
            parts = {suffix: self.read(part.name) for suffix, part in weight.tensors.items()}
            codes = Codes(name, weight.shape, weight.scheme, parts, self._metadata)
            return weight.format.read(codes, dtype or self._default_dtype)
        stored = self.read(tensor.name) if stored is None else stored
        if not stored.is_floating_point():
            return stored
        refuse_nonfinite(name, count_nonfinite(stored), stored.numel(), stored.dtype)
        values = stored if dtype is None else stored.to(dtype)
        if values is not stored:
            refuse_overflow(name, count_nonfinite(values), values.numel(), values.dtype)
        return values

    def digest(self, name: str) -> str:
        """SHA-256, in hex, of the tensor's bytes as stored, row-major, native parts joined.

        Of a weight that is stored in codes: of the codes. What belongs to them has digests of its own.
        """
        return tensor_digest(self.read(name))

    def companion_digests(self, name: str) -> dict[str, str]:
        """Digests of everything that a weight's codes mean nothing without, by name as stored."""
        digests = {each: self.digest(each) for each in self.companions(name)}
        if name in self._metadata and name in self._quantized:
            digests[f"{name} (metadata)"] = hashlib.sha256(self._metadata[name].encode()).hexdigest()
        return digests

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All weights in plain numbers under Hugging Face names, without scales, as :meth:`weight` gives each.

        Goes with ``config``: ``Class.from_pretrained(None, config=Class.config_class(**checkpoint.config),
        state_dict=checkpoint.state_dict(dtype), dtype=dtype)``. Without its own ``dtype``, ``from_pretrained`` casts
        everything to the config's.
        """
        self.refuse_unreadable()
        return {name: self.weight(name, dtype) for name in self.weight_names()}

    def refuse_unreadable(self) -> None:
        """FormatError where weights beside the attention's are stored in a form that is not read."""
        if self.quantization is not None and self.quantization.unreadable:
            raise FormatError(f"{self.path} has weights that cannot be read: {self.quantization.unreadable}")

    def _find(self, name: str) -> Stored:
        if name in self._quantized:
            return self._quantized[name].codes
        if name not in self._tensors:
            near = difflib.get_close_matches(name, [*self._tensors, *self._quantized], n=1)
            raise CheckpointError(f"{self.path} has no tensor {name}{f'; did you mean {near[0]}?' if near else ''}")
        return self._tensors[name]
