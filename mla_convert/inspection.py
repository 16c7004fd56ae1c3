"""What a checkpoint, or a folder of absorbed weights, is and what is wrong with it; from config and headers alone."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence

from mla_convert.architectures import LayerSpec, find_family, layer_specs, normalize_config
from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import FOLDER, MANIFEST
from mla_convert.errors import MLAConvertError, UnsupportedModelError
from mla_convert.folders import open_folder, read_config
from mla_convert.formats import plain
from mla_convert.geometry import MLAGeometry
from mla_convert.hub import HubPath
from mla_convert.inspection_report import (
    SIDES,
    AbsorbedFacts,
    Conversion,
    Dimensions,
    Inspection,
    SourceFacts,
    TensorKind,
)
from mla_convert.paths import source_of
from mla_convert.quantized import split_name
from mla_convert.recipe import plan_layers
from mla_convert.shards import is_readable
from mla_convert.source_schemes import stands_for
from mla_convert.storage import AbsorbedCheckpoint, interrupted


def inspect_checkpoint(source: str | os.PathLike[str]) -> Inspection:
    """Look at a checkpoint folder, a hub repository, or a folder that ``convert`` wrote; reads no weights.

    What is wrong with it is in the result. Raises CheckpointError where there is nothing of the kind to look at.
    """
    path = open_folder(source_of(source))
    problems: list[str] = []
    notes: list[str] = []
    manifest = _manifest_folder(path)
    unfinished = "" if manifest is not None else interrupted(path)
    facts = absorbed = None
    if is_readable(path / "config.json") or not (manifest or unfinished):
        facts = _inspect_source(path, problems, notes)
    if manifest is not None:
        absorbed = _inspect_absorbed(manifest, problems)
    if unfinished:
        problems.append(unfinished)
    if manifest is not None and isinstance(path, HubPath):
        notes.append(f"patch and load take a folder with absorbed weights: hf download {path.repo_id} --local-dir OUT")
    return Inspection(str(path), facts, absorbed, tuple(problems), tuple(notes))


def _manifest_folder(path: pathlib.Path) -> pathlib.Path | None:
    places = (path, path / FOLDER)
    return next((place for place in places if (place / MANIFEST).is_file()), None)


def _inspect_source(path: pathlib.Path, problems: list[str], notes: list[str]) -> SourceFacts | None:
    raw = read_config(path)  # without it there is nothing to look at
    try:
        config = normalize_config(raw)
        family, specs = find_family(config), layer_specs(config)
    except UnsupportedModelError as error:
        problems.append(str(error))
        return None
    try:
        checkpoint = Checkpoint.open(path)
    except MLAConvertError as error:
        problems.append(str(error))
        dimensions = _dimensions(specs)
        return SourceFacts(family.model_type, None, dimensions, (), None, 0, 0, 0, (), None)
    notes += _notes(checkpoint)
    layers = (*checkpoint.layers, *checkpoint.extra_layers)
    names = [name for spec in layers for name in spec.shapes()]
    quantization = checkpoint.quantization
    return SourceFacts(
        model_type=family.model_type,
        layout=checkpoint.layout,
        dimensions=_dimensions(layers),
        extra_layers=tuple(spec.index for spec in checkpoint.extra_layers),
        quantization=None if quantization is None else quantization.method,
        tensors=len(checkpoint.names()),
        bytes=sum(map(checkpoint.stored_bytes, checkpoint.weight_names())),
        bytes_attention=sum(map(checkpoint.stored_bytes, names)),
        kinds=_source_kinds(checkpoint, names),
        conversion=_conversion(checkpoint, problems),
    )


def _dimensions(specs: Iterable[LayerSpec]) -> tuple[Dimensions, ...]:
    found: dict[tuple[MLAGeometry, str, str], list[int]] = {}
    for spec in specs:
        reasons = spec.family.between("qk"), spec.family.between("vo")
        found.setdefault((spec.geometry, *reasons), []).append(spec.index)
    return tuple(Dimensions(tuple(layers), *key) for key, layers in found.items())


def _source_kinds(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[TensorKind, ...]:
    def stored(name: str) -> str:
        scheme = checkpoint.scheme(name)
        return plain(checkpoint.info(name).dtype) if scheme is None else scheme.label

    entries = ((name, checkpoint.info(name).shape, stored(name), checkpoint.stored_bytes(name)) for name in names)
    return _kinds(entries)


def _kinds(entries: Iterable[tuple[str, tuple[int, ...], str, int]]) -> tuple[TensorKind, ...]:
    found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for name, shape, stored, nbytes in entries:
        found.setdefault((split_name(name)[0].rpartition(".")[2], shape, stored), []).append(nbytes)
    return tuple(TensorKind(*key, layers=len(sizes), bytes=sum(sizes)) for key, sizes in found.items())


def _conversion(checkpoint: Checkpoint, problems: list[str]) -> Conversion | None:
    def size(form: str) -> int:
        planned = plan_layers(checkpoint, {"qk": form, "vo": form}, None)
        return sum(tensor.nbytes for layer in planned for tensor in layer.tensors.values())

    try:
        planned = plan_layers(checkpoint, {"qk": "auto", "vo": "auto"}, None)
        qk, vo = (_one_of([getattr(layer.forms, side) for layer in planned]) for side, _ in SIDES)
        fusable = not any(spec.family.between(side) for spec in checkpoint.layers for side, _ in SIDES)
        return Conversion(qk, vo, size("auto"), size("factored"), size("fused") if fusable else None)
    except MLAConvertError as error:
        problems.append(str(error))
        return None


def _notes(checkpoint: Checkpoint) -> Iterable[str]:
    quantization = checkpoint.quantization
    if quantization is None:
        return
    if quantization.unreadable:
        yield f"the attention is plain and can be converted; the rest cannot be loaded: {quantization.unreadable}"
    modules = {split_name(name)[0] for name in checkpoint.names()}
    unmatched = [entry for entry in quantization.ignored if not any(stands_for(entry, module) for module in modules)]
    if unmatched:
        yield f"the config's quantization_config lists modules that are not there: {', '.join(unmatched[:5])}"


def _inspect_absorbed(folder: pathlib.Path, problems: list[str]) -> AbsorbedFacts | None:
    try:
        store = AbsorbedCheckpoint(folder)
    except MLAConvertError as error:
        problems.append(str(error))
        return None
    manifest = store.manifest
    tensors = manifest.tensors.values()
    stored = ((t.name, t.shape, plain(t.dtype) if t.scheme is None else str(t.scheme), t.nbytes) for t in tensors)
    forms = dict.fromkeys(tensor.form or tensor.dtype for tensor in manifest.source.tensors.values())
    return AbsorbedFacts(
        folder=str(store.path),
        model_type=manifest.source.model_type,
        tool_version=manifest.tool_version,
        dtype=manifest.dtype,
        layers=tuple(store.layers),
        qk=_one_of([layer.qk for layer in manifest.layers]),
        vo=_one_of([layer.vo for layer in manifest.layers]),
        source_forms=tuple(forms),
        bytes=sum(tensor.nbytes for tensor in tensors),
        kinds=_kinds(stored),
    )


def _one_of(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else "mixed"
