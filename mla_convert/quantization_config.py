"""What a config says of quantized weights: which modules are stored in codes, and how, as data.

Each way of saying so is a row of :data:`METHODS`, by its ``quant_method``: a function from that block of the config to
a :class:`Quantization`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mla_convert.compressed_tensors_config import compressed_tensors
from mla_convert.errors import FormatError
from mla_convert.quantization_entries import INSTEAD, group_block, mapping, one_of, pair, refuse, strings
from mla_convert.source_schemes import CHANNEL, TENSOR, Quantization, SourceScheme


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
        reason = f"the config has quant_method = {method!r}; read are {', '.join(METHODS)}: {INSTEAD}"
        return Quantization(method, unreadable=reason)
    return METHODS[method](given)


def _blocks(config: Mapping[str, Any]) -> Iterable[Any]:
    inner = [config[key] for key in ("text_config", "language_config") if isinstance(config.get(key), Mapping)]
    for holder in (config, *inner):
        yield holder.get("quantization_config") or holder.get("compression_config")


EVERY = ("Linear",)
_KEPT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def _scaled(format: str) -> Callable[[Mapping[str, Any]], Quantization]:
    """A method that stores codes with one scale each for a block, a row, or a tensor."""

    def read(given: Mapping[str, Any]) -> Quantization:
        one_of(given, "fmt", "e4m3", ("e4m3",))
        block = pair(given, "weight_block_size") if given.get("weight_block_size") is not None else None
        # Without blocks the scale's own shape says whether it is the tensor's or the rows'.
        scheme = SourceScheme(format, block=block or TENSOR)
        return Quantization(given["quant_method"], ((EVERY, scheme),), strings(given, *_KEPT))

    return read


def _awq(given: Mapping[str, Any]) -> Quantization:
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    if version != "gemm":
        raise refuse(f"version = {version!r}", "'gemm'")
    bits = one_of({"bits": given.get("bits", given.get("w_bit"))}, "bits", None, (4,))
    size = given.get("group_size", given.get("q_group_size", 128))
    zero = given.get("zero_point", True)
    scheme = SourceScheme("awq", bits, group_block({"group_size": size}), symmetric=not zero)
    return Quantization("awq", ((EVERY, scheme),), strings(given, *_KEPT))


def _gptq(given: Mapping[str, Any]) -> Quantization:
    bits = one_of(given, "bits", None, (4, 8))
    stored = given.get("checkpoint_format") or given.get("format") or "gptq"
    one_of({"checkpoint_format": stored}, "checkpoint_format", None, ("gptq", "gptq_v2"))
    dynamic = mapping(given.get("dynamic") or {}, "dynamic")
    special = [name for name in dynamic if not name.startswith("-:")]
    if special:
        raise refuse(f"dynamic settings for {special[0]!r}", "one setting for all modules")
    scheme = SourceScheme(
        "gptq", bits, group_block(given, default=128), symmetric=False, zero_offset=int(stored == "gptq")
    )
    return Quantization("gptq", ((EVERY, scheme),), strings(given, *_KEPT))


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
        raise refuse(f"quantization = {inner!r:.80}", "objects")
    ignored = strings(inner, *_KEPT)
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        layers = inner.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(entry, Mapping) for entry in layers.values()):
            raise refuse("MIXED_PRECISION without quantized_layers", "layers with a quant_algo each")
        groups = tuple(((name,), _algorithm(entry)) for name, entry in layers.items())
        return Quantization("modelopt", groups, ignored)
    return Quantization("modelopt", ((EVERY, _algorithm(inner)),), ignored)


def _algorithm(given: Mapping[str, Any]) -> SourceScheme:
    algorithm = str(given.get("quant_algo")).upper()
    if algorithm not in _ALGORITHMS:
        raise refuse(f"quant_algo = {given.get('quant_algo')!r} (ModelOpt)", ", ".join(_ALGORITHMS))
    scheme = _ALGORITHMS[algorithm]
    if scheme.bits == 4 and given.get("group_size") is not None:
        return dataclasses.replace(scheme, block=group_block(given))
    return scheme


def _torchao(given: Mapping[str, Any]) -> Quantization:
    return Quantization("torchao", ((EVERY, SourceScheme("torchao")),), strings(given, *_KEPT))


def _bitsandbytes(given: Mapping[str, Any]) -> Quantization:
    four = bool(given.get("load_in_4bit", given.get("_load_in_4bit")))
    scheme = SourceScheme("bitsandbytes-4bit", 4, (1, None)) if four else SourceScheme("bitsandbytes-int8", 8, CHANNEL)
    return Quantization("bitsandbytes", ((EVERY, scheme),), strings(given, *_KEPT))


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _scaled("float8"),
    "fbgemm_fp8": _scaled("float8"),
    "w8a8_fp8": _scaled("float8"),
    "w8a8_int8": _scaled("int8"),
    "blockwise_int8": _scaled("int8"),
    "compressed-tensors": compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
}
