"""What a config says of quantized weights: which modules are stored in codes, and how, as data.

Each way of saying so is a row of :data:`METHODS`, by its ``quant_method``: a function from that block of the config to
a :class:`Quantization`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mla_convert.errors import FormatError
from mla_convert.source_schemes import CHANNEL, TENSOR, Block, Quantization, SourceScheme

_INSTEAD = "dequantize the checkpoint with its own tools, or take one in another form"


def parse_quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Quantization | None:
    """What a config says; None where nothing is quantized. ``modelopt`` is the content of hf_quant_config.json.

    The block may stand in the config or in its ``text_config``, as ``quantization_config`` or ``compression_config``.
    FormatError where it contradicts itself or asks for a variant of a known form that is not read; a method that is
    not known gives an ``unreadable`` quantization.
    """
    given = next((block for block in _blocks(config) if block), modelopt)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and (method == "modelopt" or (method is None and "quantization" in given)):
        method = "modelopt"
    if not isinstance(given, Mapping) or not isinstance(method, str):
        raise FormatError(
            f"the config's quantization_config is {given!r:.100}, without a quant_method; supported are "
            f"{', '.join(METHODS)}: take the config.json that belongs to the checkpoint"
        )
    if method not in METHODS:
        reason = f"the config has quant_method = {method!r}; read are {', '.join(METHODS)}: {_INSTEAD}"
        return Quantization(method, unreadable=reason)
    return METHODS[method](given)


def _blocks(config: Mapping[str, Any]) -> Iterable[Any]:
    inner = [config[key] for key in ("text_config", "language_config") if isinstance(config.get(key), Mapping)]
    for holder in (config, *inner):
        yield holder.get("quantization_config") or holder.get("compression_config")


def _refuse(what: str, supported: str) -> FormatError:
    return FormatError(f"the config's quantization_config has {what}; supported are {supported}: {_INSTEAD}")


def _strings(given: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The lists under ``keys`` put together, each a list of strings or absent."""
    found: list[str] = []
    for key in keys:
        entries = given.get(key) or ()
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
            raise _refuse(f"{key} = {entries!r:.80}", "lists of names")
        found += entries
    return tuple(found)


def _pair(given: Mapping[str, Any], key: str) -> Block:
    block = given.get(key)
    sound = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not isinstance(block, list | tuple) or not sound:
        raise _refuse(f"{key} = {block!r}", "blocks of [rows, columns], such as [128, 128]")
    return block[0], block[1]


def _group(given: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> Block:
    size = given.get(key, default)
    if type(size) is not int or (size <= 0 and size != -1):
        raise _refuse(f"{key} = {size!r}", "positive whole numbers, and -1 for a scale per row")
    return CHANNEL if size == -1 else (1, size)


def _one(given: Mapping[str, Any], key: str, default: Any, supported: tuple[Any, ...]) -> Any:
    value = given.get(key, default)
    if value not in supported:
        raise _refuse(f"{key} = {value!r}", ", ".join(map(repr, supported)))
    return value


EVERY = ("Linear",)
_KEPT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def _scaled(format: str) -> Callable[[Mapping[str, Any]], Quantization]:
    """A method that stores codes with one scale each for a block, a row, or a tensor."""

    def read(given: Mapping[str, Any]) -> Quantization:
        _one(given, "fmt", "e4m3", ("e4m3",))
        block = _pair(given, "weight_block_size") if given.get("weight_block_size") is not None else None
        # Without blocks the scale's own shape says whether it is the tensor's or the rows'.
        scheme = SourceScheme(format, block=block or TENSOR)
        return Quantization(given["quant_method"], ((EVERY, scheme),), _strings(given, *_KEPT))

    return read


def _awq(given: Mapping[str, Any]) -> Quantization:
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refuse(f"version = {version!r}", "'gemm'")
    bits = _one({"bits": given.get("bits", given.get("w_bit"))}, "bits", None, (4,))
    size = given.get("group_size", given.get("q_group_size", 128))
    zero = given.get("zero_point", True)
    scheme = SourceScheme("awq", bits, _group({"group_size": size}), symmetric=not zero)
    return Quantization("awq", ((EVERY, scheme),), _strings(given, *_KEPT))


def _gptq(given: Mapping[str, Any]) -> Quantization:
    bits = _one(given, "bits", None, (4, 8))
    stored = given.get("checkpoint_format") or given.get("format") or "gptq"
    _one({"checkpoint_format": stored}, "checkpoint_format", None, ("gptq", "gptq_v2"))
    dynamic = _object(given.get("dynamic") or {}, "dynamic")
    special = [name for name in dynamic if not name.startswith("-:")]
    if special:
        raise _refuse(f"dynamic settings for {special[0]!r}", "one setting for all modules")
    scheme = SourceScheme("gptq", bits, _group(given, default=128), symmetric=False, zero_offset=int(stored == "gptq"))
    return Quantization("gptq", ((EVERY, scheme),), _strings(given, *_KEPT))


# ModelOpt's quant_algo -> scheme; the block of FP8_PB_WO is a constant of its exporter.
_ALGORITHMS = {
    "FP8": SourceScheme("float8"),
    "FP8_PER_CHANNEL_PER_TOKEN": SourceScheme("float8", block=CHANNEL),
    "FP8_PB_WO": SourceScheme("float8", block=(128, 128)),
    "NVFP4": SourceScheme("modelopt-nvfp4", 4, (1, 16)),
}


def _modelopt(given: Mapping[str, Any]) -> Quantization:
    inner = given.get("quantization", given)
    if not isinstance(inner, Mapping):
        raise _refuse(f"quantization = {inner!r:.80}", "objects")
    ignored = _strings(inner, *_KEPT)
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        layers = inner.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(entry, Mapping) for entry in layers.values()):
            raise _refuse("MIXED_PRECISION without quantized_layers", "layers with a quant_algo each")
        groups = tuple(((name,), _algorithm(entry)) for name, entry in layers.items())
        return Quantization("modelopt", groups, ignored)
    return Quantization("modelopt", ((EVERY, _algorithm(inner)),), ignored)


def _algorithm(given: Mapping[str, Any]) -> SourceScheme:
    algorithm = str(given.get("quant_algo")).upper()
    if algorithm not in _ALGORITHMS:
        raise _refuse(f"quant_algo = {given.get('quant_algo')!r} (ModelOpt)", ", ".join(_ALGORITHMS))
    scheme = _ALGORITHMS[algorithm]
    if scheme.bits == 4 and given.get("group_size") is not None:
        return dataclasses.replace(scheme, block=_group(given))
    return scheme


def _torchao(given: Mapping[str, Any]) -> Quantization:
    return Quantization("torchao", ((EVERY, SourceScheme("torchao")),), _strings(given, *_KEPT))


def _bitsandbytes(given: Mapping[str, Any]) -> Quantization:
    four = bool(given.get("load_in_4bit", given.get("_load_in_4bit")))
    scheme = SourceScheme("bitsandbytes-4bit", 4, (1, None)) if four else SourceScheme("bitsandbytes-int8", 8, CHANNEL)
    return Quantization("bitsandbytes", ((EVERY, scheme),), _strings(given, *_KEPT))


def _compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    groups = given.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refuse(f"config_groups = {groups!r:.80}", "groups with targets and weights")
    overall = given.get("format")
    read = [
        (_strings(group, "targets"), scheme)
        for group in groups.values()
        if (scheme := _weights(group.get("weights"), group.get("format") or overall)) is not None
    ]
    ignored = _strings(given, "ignore")
    return Quantization("compressed-tensors", tuple(read), ignored, literal=True, rotated=_rotated(given))


def _rotated(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Targets of ``transform_config`` whose activations are transformed; what is done to weights is in them already."""
    transforms = _object(given.get("transform_config") or {}, "transform_config")
    groups = _object(transforms.get("config_groups") or {}, "transform_config.config_groups")
    targets: list[str] = []
    for group in groups.values():
        applied = _object(group, "a group of transform_config").get("apply") or ()
        if not isinstance(applied, list | tuple):
            raise _refuse(f"apply = {applied!r:.80} in transform_config", "lists")
        for entry in applied:
            if not str(_object(entry, "apply").get("location")).startswith("weight_"):
                targets += _strings({"targets": _listed(entry.get("targets"))}, "targets")
    return tuple(targets)


def _object(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _refuse(f"{what} = {given!r:.80}", "objects")
    return given


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


# compressed-tensors' format -> row of FORMATS. In a mixture each group has its own, or its arguments tell.
_CT_FORMATS = {
    "float-quantized": "float-quantized",
    "int-quantized": "int-quantized",
    "naive-quantized": "",
    "pack-quantized": "pack-quantized",
    "nvfp4-pack-quantized": "nvfp4-pack-quantized",
    "mixed-precision": "",
    None: "",
}
_CT_KINDS = {("float", 8): "float-quantized", ("int", 8): "int-quantized", ("float", 4): "nvfp4-pack-quantized"}


def _weights(weights: Any, stored: Any) -> SourceScheme | None:
    """The scheme of a group's ``weights``; None where only activations are quantized, or nothing is stored in codes."""
    if weights is None or stored == "dense":
        return None
    if not isinstance(weights, Mapping):
        raise _refuse(f"weights = {weights!r:.80}", "objects")
    if stored not in tuple(_CT_FORMATS):
        raise _refuse(f"format = {stored!r}", ", ".join(name for name in _CT_FORMATS if name))
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    if type(bits) is not int:
        raise _refuse(f"num_bits = {bits!r:.80}", "whole numbers")
    format = _CT_FORMATS[stored] or _CT_KINDS.get((kind, bits), "pack-quantized")
    if (format, kind, bits) not in _CT_READABLE:
        raise _refuse(f"weights of {bits} bits of type {kind!r} in the format {format!r}", "the forms in the README")
    return SourceScheme(format, bits, _ct_block(weights), symmetric=bool(weights.get("symmetric", True)))


_CT_READABLE = {
    ("float-quantized", "float", 8),
    ("int-quantized", "int", 8),
    ("nvfp4-pack-quantized", "float", 4),
    *(("pack-quantized", "int", bits) for bits in range(2, 9)),
}


def _ct_block(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if weights.get("group_size") is None else "group"
    if strategy in ("group", "tensor_group"):
        return _group(weights)
    if strategy == "block":
        return _pair(weights, "block_structure")
    return {"tensor": TENSOR, "channel": CHANNEL}[_one({"strategy": strategy}, "strategy", None, ("tensor", "channel"))]


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _scaled("float8"),
    "fbgemm_fp8": _scaled("float8"),
    "w8a8_fp8": _scaled("float8"),
    "w8a8_int8": _scaled("int8"),
    "blockwise_int8": _scaled("int8"),
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
}
