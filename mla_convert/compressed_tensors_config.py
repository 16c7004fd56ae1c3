"""What compressed-tensors says in a config of quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_convert.quantization_entries import group_block, mapping, one_of, pair, refuse, strings
from mla_convert.source_schemes import CHANNEL, TENSOR, Block, Quantization, SourceScheme

# compressed-tensors' format -> row of FORMATS. In a mixture each group has its own, or its arguments tell.
_FORMATS = {
    "float-quantized": "float-quantized",
    "int-quantized": "int-quantized",
    "naive-quantized": "",
    "pack-quantized": "pack-quantized",
    "nvfp4-pack-quantized": "nvfp4-pack-quantized",
    "mixed-precision": "",
    None: "",
}
_KINDS = {("float", 8): "float-quantized", ("int", 8): "int-quantized", ("float", 4): "nvfp4-pack-quantized"}
_READABLE = {
    ("float-quantized", "float", 8),
    ("int-quantized", "int", 8),
    ("nvfp4-pack-quantized", "float", 4),
    *(("pack-quantized", "int", bits) for bits in range(2, 9)),
}


def compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    """What the block ``given`` says; FormatError for what contradicts itself or is not read."""
    groups = given.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise refuse(f"config_groups = {groups!r:.80}", "groups with targets and weights")
    overall = given.get("format")
    read = [
        (strings(group, "targets"), scheme)
        for group in groups.values()
        if (scheme := _weights(group.get("weights"), group.get("format") or overall)) is not None
    ]
    ignored = strings(given, "ignore")
    return Quantization("compressed-tensors", tuple(read), ignored, literal=True, rotated=_rotated(given))


def _rotated(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Targets of ``transform_config`` whose activations are transformed; what is done to weights is in them already."""
    transforms = mapping(given.get("transform_config") or {}, "transform_config")
    groups = mapping(transforms.get("config_groups") or {}, "transform_config.config_groups")
    targets: list[str] = []
    for group in groups.values():
        applied = mapping(group, "a group of transform_config").get("apply") or ()
        if not isinstance(applied, list | tuple):
            raise refuse(f"apply = {applied!r:.80} in transform_config", "lists")
        for entry in applied:
            if not str(mapping(entry, "apply").get("location")).startswith("weight_"):
                targets += strings({"targets": _listed(entry.get("targets"))}, "targets")
    return tuple(targets)


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _weights(weights: Any, stored: Any) -> SourceScheme | None:
    """The scheme of a group's ``weights``; None where only activations are quantized, or nothing is stored in codes."""
    if weights is None or stored == "dense":
        return None
    if not isinstance(weights, Mapping):
        raise refuse(f"weights = {weights!r:.80}", "objects")
    if stored not in tuple(_FORMATS):
        raise refuse(f"format = {stored!r}", ", ".join(name for name in _FORMATS if name))
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    if type(bits) is not int:
        raise refuse(f"num_bits = {bits!r:.80}", "whole numbers")
    format = _FORMATS[stored] or _KINDS.get((kind, bits), "pack-quantized")
    if (format, kind, bits) not in _READABLE:
        raise refuse(f"weights of {bits} bits of type {kind!r} in the format {format!r}", "the forms in the README")
    return SourceScheme(format, bits, _block(weights), symmetric=bool(weights.get("symmetric", True)))


def _block(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if weights.get("group_size") is None else "group"
    if strategy in ("group", "tensor_group"):
        return group_block(weights)
    if strategy == "block":
        return pair(weights, "block_structure")
    return {"tensor": TENSOR, "channel": CHANNEL}[
        one_of({"strategy": strategy}, "strategy", None, ("tensor", "channel"))
    ]
