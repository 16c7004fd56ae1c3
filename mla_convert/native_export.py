"""From Hugging Face's names and config to DeepSeek's own: the way back of :mod:`mla_convert.native`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mla_convert.errors import CheckpointError, UsageError
from mla_convert.native import KEYS, MODULES, PARAMETERS, ROPE, SCORES, Placement, hf_config
from mla_convert.wording import option

# HF module, numbers as "#" -> (native module, placement).
_BACK = {theirs: (ours, placement) for ours, (theirs, placement) in MODULES.items()}
_PARAMETERS = {theirs: ours for ours, theirs in PARAMETERS.items()}
_BIAS = ".mlp.gate.e_score_correction_bias"
# DeepSeek's code turns YaRN on only where its ``max_seq_len`` is beyond the original length; this is its default.
_DEFAULT_LENGTH = 16384
#: Where a config has no length: any serves, since only whether the two native ones are equal is asked.
_NO_LENGTH = 4096
#: What a native config does not say, or says in its own way, and what has nothing to do with values.
_UNSAID = {"architectures", "bos_token_id", "eos_token_id", "num_nextn_predict_layers", "max_position_embeddings"}


def native_name(name: str) -> tuple[str, Placement]:
    """DeepSeek's name of an HF tensor, and how parts share it; CheckpointError where the layout has none."""
    module, _, parameter = name.rpartition(".")
    known = _BACK.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module))
    word = "bias" if name.endswith(_BIAS) else _PARAMETERS.get(parameter)
    if known is None or word is None:
        raise CheckpointError(
            f"{name} has no name in DeepSeek's native layout as this version knows it (DeepSeek-V2 and -V3 models); "
            "leave the checkpoint in its Hugging Face form"
        )
    ours, placement = known
    for number in re.findall(r"(?<=\.)\d+(?=\.|$)", module):
        ours = ours.replace("#", number, 1)
    return f"{ours}.{word}", placement


def native_config(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """DeepSeek's own keys for a normalized HF config; ``quantization`` is its ``quantization_config``, or None.

    UsageError where that code would compute something else than the model does.
    """
    scores = {model_type: score for score, model_type in SCORES.items()}
    if config["model_type"] not in scores:
        raise UsageError(
            f"{option('target', 'native')} is for {' and '.join(sorted(scores))} models, and SOURCE is a "
            f"{config['model_type']}; DeepSeek's code runs no others"
        )
    unsaid = [theirs for theirs, _ in KEYS.values() if config.get(theirs) is None and theirs != "q_lora_rank"]
    if unsaid:
        raise UsageError(
            f"the config has no {unsaid[0]}, for which transformers and DeepSeek's native code have defaults of their "
            "own; set it to what the model was trained with"
        )
    native = {ours: config[theirs] for ours, (theirs, _) in KEYS.items()}
    native["q_lora_rank"] = config.get("q_lora_rank") or 0
    native |= _rope(config.get("rope_parameters") or {}, config.get("max_position_embeddings") or _NO_LENGTH)
    native["score_func"] = scores[config["model_type"]]
    native["dtype"] = "bf16" if quantization is None else "fp8"
    if quantization is not None and quantization.get("scale_fmt"):
        native["scale_fmt"] = quantization["scale_fmt"]
    _refuse_differences(config, hf_config(native))
    return native


def _rope(rope: Mapping[str, Any], length: int) -> dict[str, Any]:
    native = {ours: rope[theirs] for ours, (theirs, _) in ROPE.items() if theirs in rope}
    if rope.get("rope_type", "default") == "default":
        return native | {"original_seq_len": length, "max_seq_len": length}
    original, factor = native.get("original_seq_len"), native.get("rope_factor")
    if isinstance(original, int) and isinstance(factor, int | float) and original >= _DEFAULT_LENGTH:
        native["max_seq_len"] = int(original * factor)
    return native


def _refuse_differences(config: Mapping[str, Any], back: Mapping[str, Any]) -> None:
    for key in sorted(set(back) - _UNSAID - {"quantization_config"}):
        found, meant = config.get(key), back[key]
        if isinstance(meant, Mapping) and isinstance(found, Mapping):
            found = {name: found.get(name) for name in meant}
        if found is not None and found != meant:
            raise UsageError(
                f"the config has {key} = {found!r}, and DeepSeek's native code computes with {meant!r}; leave the "
                "checkpoint in its Hugging Face form"
            )
