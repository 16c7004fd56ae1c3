"""Read a manifest, refusing what is of another version, incomplete or contradictory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from mla_convert import version
from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import CheckpointError, MLAConvertError, SidecarError
from mla_convert.formats import plain
from mla_convert.forms import FORMS
from mla_convert.geometry import MLAGeometry
from mla_convert.manifest import (
    FORMAT_VERSION,
    KEYS,
    Manifest,
    Source,
    SourceTensor,
    StoredLayer,
    StoredTensor,
    stored_shape,
)
from mla_convert.schemes import Scheme, all_schemes
from mla_convert.shards import parse_json

_AGAIN = "convert the source again into a new folder"
_DTYPES = {plain(dtype): dtype for dtype in FLOAT_DTYPES}
_T = TypeVar("_T")


def read_manifest(text: bytes, *, where: str) -> Manifest:
    """Read a manifest; ``where`` names the file. SidecarError for a newer format version and for any damage."""
    try:
        found = parse_json(text, what=where, hint=_AGAIN)
    except CheckpointError as error:
        raise SidecarError(str(error)) from error
    format_version = _take(found, "format_version", int, where)
    if format_version != FORMAT_VERSION:
        raise SidecarError(
            f"{where} has format version {format_version} (written by mla_convert "
            f"{found.get('tool_version')}); this is mla_convert {version.__version__}, which reads version "
            f"{FORMAT_VERSION}: update mla_convert, or {_AGAIN}"
        )
    source = _take(found, "source", dict, where)
    tensors = _take(source, "tensors", dict, where)
    manifest = Manifest(
        source=Source(
            model_type=_take(source, "model_type", str, where),
            layout=_take(source, "layout", str, where),
            config_sha256=_take(source, "config_sha256", str, where),
            tensors={name: source_from_dict(name, entry, where) for name, entry in tensors.items()},
        ),
        layers=tuple(_layer_from_dict(entry, where) for entry in _take(found, "layers", list, where)),
        dtype=_take(found, "dtype", str, where),
        tool_version=_take(found, "tool_version", str, where),
    )
    if found.get("quantization") != manifest.quantization:
        raise SidecarError(
            f"{where} has a quantization that is not that of its tensors; the manifest is damaged, or of a mixture "
            f"that this version does not know: {_AGAIN}"
        )
    return manifest


def _layer_from_dict(entry: Any, where: str) -> StoredLayer:
    index = _take(entry, "index", int, where)
    where = f"{where}, layer {index}"
    forms = _take(entry, "forms", dict, where)
    layer = StoredLayer(
        index=index,
        geometry=_geometry(_take(entry, "geometry", dict, where), where),
        qk=_choice(forms, "qk", {form: form for form in FORMS}, where),
        vo=_choice(forms, "vo", {form: form for form in FORMS}, where),
        tensors={key: _tensor_from_dict(tensor, where) for key, tensor in _take(entry, "tensors", dict, where).items()},
        sources=tuple(str(name) for name in _take(entry, "sources", list, where)),
    )
    _check_layer(layer, where)
    return layer


def _tensor_from_dict(entry: Any, where: str) -> StoredTensor:
    name = _take(entry, "name", str, where)
    tensor = StoredTensor(
        name=name,
        shape=_shape(entry, where),
        dtype=_choice(entry, "dtype", _DTYPES, where),
        largest_error=_take(entry, "largest_error", float, where),
        frobenius_error=_take(entry, "frobenius_error", float, where),
    )
    if "quantization" not in entry:
        return tensor
    coded = _take(entry, "quantization", dict, where)
    scheme = _scheme(coded, f"{where}, {name}")
    return dataclasses.replace(tensor, scheme=scheme, rounding=_take(coded, "rounding", str, where))


def _scheme(coded: dict[str, Any], where: str) -> Scheme:
    plain_values = {key: coded.get(key) for key in ("kind", "block")}
    for scheme in all_schemes():
        if scheme.to_dict() == plain_values:
            return scheme
    known = ", ".join(map(str, all_schemes()))
    raise SidecarError(f"{where} is quantized as {plain_values}; known are {known}: {_AGAIN}")


def _check_layer(layer: StoredLayer, where: str) -> None:
    expected = {key: stored_shape(key, layer.geometry) for key in (KEYS["qk", layer.qk], KEYS["vo", layer.vo])}
    found = {key: tensor.shape for key, tensor in layer.tensors.items()}
    if found != expected:
        raise SidecarError(
            f"{where} lists tensors {found}; its geometry with the key side {layer.qk} and the value side {layer.vo} "
            f"makes them {expected}: the manifest is damaged, {_AGAIN}"
        )


def _geometry(entry: dict[str, Any], where: str) -> MLAGeometry:
    names = {field.name for field in dataclasses.fields(MLAGeometry)}
    try:
        if set(entry) != names:
            raise SidecarError(f"it lists {sorted(entry)} instead of {sorted(names)}")
        return MLAGeometry(**entry)
    except (MLAConvertError, TypeError) as error:
        raise SidecarError(f"{where} has a geometry that cannot be read ({error}); {_AGAIN}") from error


def source_from_dict(name: str, entry: Any, where: str) -> SourceTensor:
    """One source tensor as the manifest describes it; ``where`` names the file. SidecarError for damage."""
    where = f"{where}, source tensor {name}"
    quantized = _take(entry, "quantized", bool, where)
    companions = _take(entry, "companions", dict, where) if quantized else {}
    return SourceTensor(
        name=name,
        shape=_shape(entry, where),
        dtype=_take(entry, "dtype", str, where),
        sha256=_take(entry, "sha256", str, where),
        source_dtype=_choice(entry, "source_dtype", _DTYPES, where),
        form=_take(entry, "form", str, where) if quantized else None,
        companions={part: _take(companions, part, str, where) for part in companions},
    )


def _shape(entry: Any, where: str) -> tuple[int, ...]:
    shape = _take(entry, "shape", list, where)
    if not all(type(size) is int and size > 0 for size in shape):
        raise SidecarError(f"{where} has the shape {shape}; the manifest is damaged, {_AGAIN}")
    return tuple(shape)


def _choice(entry: Any, key: str, known: Mapping[Any, _T], where: str) -> _T:
    name = _take(entry, key, str, where)
    if name not in known:
        raise SidecarError(f"{where} has {key} = {name!r}; known are {', '.join(known)}: {_AGAIN}")
    return known[name]


def _take(entry: Any, key: str, kind: type[_T], where: str) -> _T:
    """``entry[key]``, which must be of ``kind``."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SidecarError(f"{where} has no {kind.__name__} under {key!r}; the manifest is damaged, {_AGAIN}")
    return value
