"""Whatever stands in a config, it is read or refused: any value in any place, by chance, and never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import family_models
import pytest
from coded import FORMS
from transformers import CONFIG_MAPPING

from mla_convert.architectures import find_family, layer_specs, normalize_config
from mla_convert.errors import MLAConvertError
from mla_convert.native_export import native_config
from mla_convert.quantization_config import parse_quantization

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**70, 1.5, float("nan"), "", "x", "4"),
    *([], [1], ["a"], [None], [[1]], [{}], {}, {"a": 1}, {"": None}),
)
CHANGES = 100
MODULES = ("model.layers.0.self_attn.kv_b_proj", "lm_head", "model.embed_tokens")
TRANSFORMS = {"config_groups": {"R": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
#: Blocks with what the forms' own lack.
MORE = {
    "several algorithms": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}},
            "exclude_modules": ["x*"],
        },
    },
    "exceptions": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}, "modules_to_not_convert": ["a"]},
    "transforms": FORMS["pack-quantized, groups"].config | {"transform_config": TRANSFORMS},
    "4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {}}},
}


def places(value: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*so_far, key)
        yield from places(inner, (*so_far, key))


def changed(config: Any, number: int) -> Any:
    """A copy with another value in one or two places."""
    chance = random.Random(number)
    config = copy.deepcopy(config)
    for _ in range(chance.choice((1, 1, 2))):
        *above, last = chance.choice(list(places(config)))
        holder = config
        for key in above:
            holder = holder[key]
        holder[last] = copy.deepcopy(chance.choice(WRONG))
    return config


@pytest.mark.parametrize("name", [*FORMS, *MORE])
def test_any_quantization_config(name: str) -> None:
    block = FORMS[name].config if name in FORMS else MORE[name]
    for number in range(CHANGES):
        config = changed({"quantization_config": block}, number)
        try:
            found = parse_quantization(config)
            for module in MODULES if found is not None else ():
                assert found is not None
                scheme = found.scheme(module)
                assert isinstance(found.ignores(module), bool) and isinstance(found.rotates(module), bool)
                assert scheme is None or (scheme.label and min(scheme.grid((24, 40))) > 0)
        except MLAConvertError as error:
            assert str(error)


@pytest.mark.parametrize("model_type", family_models.MODELS)
def test_any_config_of_a_family(model_type: str) -> None:
    made = CONFIG_MAPPING[model_type](**copy.deepcopy(family_models.MODELS[model_type][1]))
    plain = json.loads(json.dumps(made.to_dict(), default=str))
    for number in range(CHANGES):
        try:
            config = normalize_config(changed(plain, number))
            find_family(config)
            assert layer_specs(config)
            if config["model_type"] in ("deepseek_v2", "deepseek_v3"):
                native_config(config, None)
        except MLAConvertError as error:
            assert str(error)
