"""Absorbed weights on disk: open them, check them, read them by name, and tell whether they belong to a checkpoint."""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import FOLDER, INDEX, MANIFEST, tidy
from mla_convert.errors import CheckpointError, MismatchError, SidecarError
from mla_convert.formats import count_nonfinite, plain
from mla_convert.geometry import MLAGeometry
from mla_convert.manifest import Manifest, SourceTensor, StoredLayer
from mla_convert.manifest_reading import read_manifest
from mla_convert.paths import path_of, reading, source_of
from mla_convert.quantization import Quantized
from mla_convert.remains import INCOMPLETE
from mla_convert.shard_plan import FileTensor
from mla_convert.shards import Piece, parse_json, read_header, read_piece
from mla_convert.source_tensors import describe_source

_AGAIN = "convert the source again into a new folder"


class AbsorbedCheckpoint:
    """A complete set of absorbed weights. Opening reads the manifest and the files' headers; tensors are read lazily.

    No file is kept open, so that it can be pickled and used from several threads.
    """

    #: The folder that the files are in.
    path: pathlib.Path
    manifest: Manifest
    #: Layers by their number in the model.
    layers: Mapping[int, StoredLayer]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> AbsorbedCheckpoint:
        """Open the weights in ``folder``, or in its subfolder ``mla_absorbed``.

        SidecarError where there are none, where a run did not end, where the format is newer than this version's, or
        where files and manifest do not agree.
        """
        return cls(path_of(folder, "the folder of absorbed weights"))

    def __init__(self, folder: pathlib.Path) -> None:
        with reading(folder, SidecarError, f"check its rights, or {_AGAIN}"):
            self._open(folder)

    def _open(self, folder: pathlib.Path) -> None:
        self.path = _find(folder)
        tidy(self.path)
        file = self.path / MANIFEST
        self.manifest = read_manifest(_read(file), where=str(file))
        self.layers = {layer.index: layer for layer in self.manifest.layers}
        self._pieces = _pieces(self.path)
        self._check_headers()

    def __repr__(self) -> str:
        return f"<AbsorbedCheckpoint {len(self.layers)} layers, {self.manifest.dtype}, {str(self.path)!r}>"

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def names(self) -> list[str]:
        """Names of all stored weights, in the order of the files; a coded one counts once."""
        return list(self.manifest.tensors)

    def read(self, name: str) -> Tensor:
        """One weight in its stored dtype (float32, if it is coded). SidecarError where it is damaged or not there."""
        stored = self.read_stored(name)
        return stored.dequantize() if isinstance(stored, Quantized) else stored

    def read_stored(self, name: str) -> Tensor | Quantized:
        """One weight as it is stored, in memory of its own; otherwise as :meth:`read`."""
        if name not in self.manifest.tensors:
            near = difflib.get_close_matches(name, self.manifest.tensors, n=1)
            raise SidecarError(f"{self.path} has no tensor {name}{f'; did you mean {near[0]}?' if near else ''}")
        tensor = self.manifest.tensors[name]
        found = {part.name.rpartition(".")[2]: self._read_part(part) for part in tensor.parts}
        if tensor.scheme is None:
            return found["weight"]
        return Quantized.from_parts(name, found, tensor.scheme, tensor.shape)

    def _read_part(self, part: FileTensor) -> Tensor:
        try:
            tensor = read_piece(self._pieces[part.name])
        except (CheckpointError, OSError) as error:
            raise SidecarError(f"{self.path}: {error}; {_AGAIN}") from error
        bad = count_nonfinite(tensor)
        if bad:
            raise SidecarError(
                f"{part.name} in {self._pieces[part.name].file} has {bad} NaN or infinite values (of "
                f"{tensor.numel()}); the file is damaged, {_AGAIN}"
            )
        return tensor

    def layer_tensors(self, index: int) -> dict[str, Tensor | Quantized]:
        """One layer: ``k_b`` [H·N, C] or ``qk`` [H·(C + R), Q], and ``v_b`` [H·V, C] or ``ov`` [D, H·C]."""
        if index not in self.layers:
            raise SidecarError(f"{self.path} has no layer {index}; it has {', '.join(map(str, self.layers))}")
        return {key: self.read_stored(tensor.name) for key, tensor in self.layers[index].tensors.items()}

    def check_source(self, checkpoint: Checkpoint) -> None:
        """MismatchError, naming layer and tensor, unless the weights were made from exactly this checkpoint.

        Compares the geometry of every layer and the hash of every source tensor as stored. The same numbers in another
        layout (native parts, other shards) agree; in another dtype or quantization they do not. The config itself is
        not compared, since saving a model rewrites it.
        """
        specs = {spec.index: spec for spec in (*checkpoint.layers, *checkpoint.extra_layers)}
        if set(specs) != set(self.layers):
            raise MismatchError(
                f"{self.path} was made from a model with layers {_ranges(self.layers)}; {checkpoint.path} has layers "
                f"{_ranges(specs)}: {_AGAIN}"
            )
        for index, layer in self.layers.items():
            self.check_geometry(index, specs[index].geometry)
            for name in layer.sources:
                self._check_tensor(index, self.manifest.source.tensors[name], checkpoint)

    def check_geometry(self, index: int, geometry: MLAGeometry) -> None:
        """MismatchError unless layer ``index`` was made for ``geometry``; names every dimension that differs."""
        stored = self.layers[index].geometry
        if stored != geometry:
            differ = [
                f"{key} {getattr(stored, key)} and {getattr(geometry, key)}"
                for key in stored.__dataclass_fields__
                if getattr(stored, key) != getattr(geometry, key)
            ]
            raise MismatchError(
                f"layer {index}: the absorbed weights in {self.path} and the model differ in {', '.join(differ)}; "
                f"use the weights that were made from this model, or {_AGAIN}"
            )

    def _check_tensor(self, index: int, made_from: SourceTensor, checkpoint: Checkpoint) -> None:
        name = made_from.name
        if name not in checkpoint:
            raise MismatchError(f"layer {index}: {checkpoint.path} has no {name}; {_AGAIN}")
        found = describe_source(checkpoint, name)
        if (found.dtype, found.shape) != (made_from.dtype, made_from.shape):
            reason = (
                f"is {found.dtype} {list(found.shape)}, and the absorbed weights were made from {made_from.dtype} "
                f"{list(made_from.shape)}"
            )
        elif found.sha256 != made_from.sha256:
            reason = f"has other values (sha256 {found.sha256[:12]}…, made from {made_from.sha256[:12]}…)"
        elif (found.form, found.companions) != (made_from.form, made_from.companions):
            reason = "has the codes that the absorbed weights were made from, and other scales"
        else:
            return
        raise MismatchError(
            f"layer {index}: {name} of {checkpoint.path} {reason}; the absorbed weights in {self.path} belong to "
            f"another checkpoint: {_AGAIN}"
        )

    def _check_headers(self) -> None:
        for part in (part for tensor in self.manifest.tensors.values() for part in tensor.parts):
            if part.name not in self._pieces:
                raise SidecarError(f"{self.path}: {part.name} is in {MANIFEST} and not in {INDEX}; {_AGAIN}")
            piece = self._pieces[part.name]
            if (piece.shape, piece.dtype) != (part.shape, part.dtype):
                raise SidecarError(
                    f"{part.name} in {piece.file} is {plain(piece.dtype)} {list(piece.shape)}; {MANIFEST} says "
                    f"{plain(part.dtype)} {list(part.shape)}: the files are of different runs, {_AGAIN}"
                )


def own_sidecar(source: str | os.PathLike[str]) -> str | None:
    """``source`` itself where its subfolder ``mla_absorbed`` is there, to be opened with it; else None."""
    with reading(source_of(source), CheckpointError, "check its rights"):
        return os.fspath(source) if (source_of(source) / FOLDER).is_dir() else None


def _find(folder: pathlib.Path) -> pathlib.Path:
    """The folder with the manifest: ``folder``, or ``mla_absorbed`` inside it."""
    places = (folder, folder / FOLDER)
    for place in places:
        if (place / MANIFEST).is_file():
            return place
    if not folder.is_dir():
        raise SidecarError(f"{folder} is not a folder; give one that `mla-convert convert SOURCE OUT` has written")
    if words := interrupted(folder):
        raise SidecarError(words)
    raise SidecarError(
        f"{folder} holds no absorbed weights (no {MANIFEST}, neither there nor in {FOLDER}/); make them with "
        "`mla-convert convert SOURCE OUT`"
    )


def interrupted(folder: pathlib.Path) -> str:
    """What to say of a run that did not end in ``folder``, or ``mla_absorbed`` in it; nothing where there is none."""
    for place in (folder, folder / FOLDER):
        if (place / INCOMPLETE).is_dir():
            return (
                f"{place} holds an interrupted conversion ({INCOMPLETE}) and no complete weights; run the same "
                "conversion again, it goes on from there"
            )
    return ""


def _read(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SidecarError(f"{file} cannot be read ({error.strerror}); {_AGAIN}") from error


def _pieces(path: pathlib.Path) -> dict[str, Piece]:
    """Where each tensor of the index stands, after reading the headers of all files it names."""
    try:
        weight_map = _weight_map(path / INDEX)
        headers = {name: read_header(path / name) for name in sorted(set(weight_map.values()))}
    except CheckpointError as error:
        raise SidecarError(f"the absorbed weights in {path} are incomplete or damaged: {error}") from error
    missing = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard]]
    if missing:
        raise SidecarError(f"{path}: {missing[0]} is in {INDEX} and not in its file; {_AGAIN}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    found: Any = parse_json(_read(index), what=str(index), hint=_AGAIN).get("weight_map")
    if not isinstance(found, dict):
        raise SidecarError(f"{index} has no weight_map; {_AGAIN}")
    outside = [shard for shard in found.values() if not isinstance(shard, str) or pathlib.Path(shard).name != shard]
    if outside:
        raise SidecarError(f"{index} points to {outside[0]!r}, which is not a file beside it; {_AGAIN}")
    return found


def _ranges(indices: Mapping[int, object]) -> str:
    return f"{min(indices)} to {max(indices)} ({len(indices)})" if indices else "none"
