"""The manifest of absorbed weights: what was stored, in which form, and from which source tensors it was made.

A manifest is a tree of frozen dataclasses, written as ``mla_manifest.json``
and read by :mod:`mla_convert.manifest_reading`. It holds no paths and no times, so that
the same source and options give the same bytes. Figures that follow from the geometry (numbers read per decode step)
are written for the reader of the file, and computed again when it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mla_convert import version
from mla_convert.formats import plain
from mla_convert.forms import Form, Reads, reads
from mla_convert.geometry import MLAGeometry
from mla_convert.quantization import signal_to_noise
from mla_convert.schemes import Scheme, quantization_config
from mla_convert.shard_plan import FileTensor

FORMAT_VERSION = 1

#: What is stored for a side in a form, and under which name after the layer's prefix.
KEYS: dict[tuple[str, Form], str] = {
    ("qk", "factored"): "k_b",
    ("qk", "fused"): "qk",
    ("vo", "factored"): "v_b",
    ("vo", "fused"): "ov",
}
SUFFIXES = {
    "k_b": "k_b_proj.weight",
    "qk": "qk_absorbed.weight",
    "v_b": "v_b_proj.weight",
    "ov": "ov_absorbed.weight",
}


def stored_shape(key: str, g: MLAGeometry) -> tuple[int, int]:
    """Shape of the tensor stored under a key of :data:`SUFFIXES`, as a Linear weight."""
    return {
        "k_b": (g.num_heads * g.qk_nope_head_dim, g.kv_lora_rank),
        "v_b": (g.num_heads * g.v_head_dim, g.kv_lora_rank),
        "qk": (g.num_heads * g.latent_width, g.query_rank),
        "ov": (g.hidden_size, g.num_heads * g.kv_lora_rank),
    }[key]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One stored weight, and what rounding it cost against its float32 (or wider) reference.

    ``largest_error`` is the largest difference over the largest magnitude, ``frobenius_error`` the norm of the
    difference over the norm; both are 0 for exact slices, and of large products taken over a part of the rows
    (:func:`mla_convert.rounding.rows_compared`). A coded weight has a ``scheme`` and says in ``rounding`` how
    its codes were chosen: "nearest", "sliced" (taken over from the source), or the name of a calibrated choice; its
    ``shape`` is the weight's, its ``dtype`` what it would be stored in if it were not coded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest_error: float = 0.0
    frobenius_error: float = 0.0
    scheme: Scheme | None = None
    rounding: str = "nearest"

    @property
    def parts(self) -> tuple[FileTensor, ...]:
        """What the files hold of it."""
        if self.scheme is None:
            return (FileTensor(self.name, self.shape, self.dtype),)
        module = self.name.removesuffix("weight")
        return tuple(FileTensor(module + word, *planned) for word, planned in self.scheme.parts(self.shape).items())

    @property
    def nbytes(self) -> int:
        """Bytes of its data, scales included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def signal_to_noise(self) -> float:
        """−20·log10 of ``frobenius_error``, in decibels; infinite where nothing was lost."""
        return signal_to_noise(self.frobenius_error)


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """One layer: its geometry, the form of each side, its tensors by key (``k_b`` or ``qk``; ``v_b`` or ``ov``).

    ``sources`` names the source tensors that went into it.
    """

    index: int
    geometry: MLAGeometry
    qk: Form
    vo: Form
    tensors: Mapping[str, StoredTensor]
    sources: tuple[str, ...]

    @property
    def reads(self) -> Reads:
        """Numbers read per decode step, per side and form."""
        return reads(self.geometry)


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """A source tensor as it was stored: ``sha256`` is of its logical row-major bytes (codes, where it is quantized).

    ``form`` says how a quantized one is stored, and ``companions`` has the hashes of its scales, zero points and so on,
    by name. ``source_dtype`` is the dtype of its logical values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    source_dtype: torch.dtype
    form: str | None = None
    companions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Whether it was stored as codes with scales."""
        return self.form is not None

    @property
    def in_fp8_blocks(self) -> bool:
        """Whether it was stored as DeepSeek-V3 is: FP8 codes, a scale for each block of rows and columns."""
        return self.form is not None and self.form.startswith("float8,") and ", blocks of " in self.form


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint the weights were made from; ``config_sha256`` is of its config as canonical JSON."""

    model_type: str
    layout: str
    config_sha256: str
    tensors: Mapping[str, SourceTensor]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that is known of a set of absorbed weights. ``dtype`` is that of weights which are not coded."""

    source: Source
    layers: tuple[StoredLayer, ...]
    dtype: str
    format_version: int = FORMAT_VERSION
    tool_version: str = version.__version__

    @property
    def quantization(self) -> dict[str, Any] | None:
        """``quantization_config`` in compressed-tensors' terms; None where nothing is coded."""
        return quantization_of(self.tensors.values())

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every stored weight by its full name, in the order of the files."""
        return {tensor.name: tensor for layer in self.layers for tensor in layer.tensors.values()}

    def to_json(self) -> str:
        """The manifest's text; the same manifest always gives the same text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the file."""
        return {
            "format_version": self.format_version,
            "tool_version": self.tool_version,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "source": {
                "model_type": self.source.model_type,
                "layout": self.source.layout,
                "config_sha256": self.source.config_sha256,
                "tensors": {name: source_to_dict(tensor) for name, tensor in self.source.tensors.items()},
            },
            "layers": [_layer_to_dict(layer) for layer in self.layers],
        }


def quantization_of(tensors: Iterable[StoredTensor]) -> dict[str, Any] | None:
    """``quantization_config`` in compressed-tensors' terms for what is coded among ``tensors``; None for nothing."""
    coded = {tensor.name.split(".")[-2]: tensor.scheme for tensor in tensors if tensor.scheme is not None}
    return quantization_config(coded) if coded else None


def _layer_to_dict(layer: StoredLayer) -> dict[str, Any]:
    return {
        "index": layer.index,
        "geometry": dataclasses.asdict(layer.geometry),
        "forms": {"qk": layer.qk, "vo": layer.vo},
        "numbers_read_per_step": dataclasses.asdict(layer.reads),
        "tensors": {key: _tensor_to_dict(tensor) for key, tensor in layer.tensors.items()},
        "sources": list(layer.sources),
    }


def _tensor_to_dict(tensor: StoredTensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": plain(tensor.dtype),
        "largest_error": tensor.largest_error,
        "frobenius_error": tensor.frobenius_error,
    }
    if tensor.scheme is not None:
        entry["quantization"] = tensor.scheme.to_dict() | {"rounding": tensor.rounding}
    return entry


def source_to_dict(tensor: SourceTensor) -> dict[str, Any]:
    """Plain values, as in the file."""
    entry: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "sha256": tensor.sha256,
        "source_dtype": plain(tensor.source_dtype),
        "quantized": tensor.quantized,
    }
    if tensor.quantized:
        entry |= {"form": tensor.form, "companions": dict(tensor.companions)}
    return entry
