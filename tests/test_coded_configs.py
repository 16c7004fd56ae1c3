"""Which modules a config says are stored in codes, and how: mixtures, lists of names, and what contradicts itself."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from coded import FORMS, SIZES, Form, close, coded_config, ct, ct_group, draw_all, set_config, write_coded
from variants import attention_weights, config_v3, fp8_config, write_checkpoint

from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import FormatError
from mla_convert.quantization_config import parse_quantization

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
MODULE = KV_B.removesuffix(".weight")


def test_mixed_groups_and_ignored_names(tmp_path: pathlib.Path) -> None:
    """FP8 blocks for some projections, int4 for others, one left alone; targets by expression, by name, by class."""
    blocks, four = FORMS["float-quantized, blocks"], FORMS["pack-quantized, groups"]
    fp8 = blocks.config["config_groups"]["group_0"]
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    config = ct(four.config["config_groups"]["group_0"], overall="mixed-precision", ignore=(
        "re:.*o_proj$", "model.layers.7.self_attn.indexers_proj", "re:.*shared_experts.*", "lm_head",
    ))  # fmt: skip
    config["config_groups"]["group_1"] = fp8 | {"targets": ["re:.*self_attn.q_(a|b)_proj$", kv_a], "format": None}
    plain = attention_weights(coded_config(four), dtype=torch.bfloat16)
    stored, values = draw_all(four, coded_config(four))
    for name in plain:
        module = name.removesuffix("weight")
        if "q_a_proj" in name or "q_b_proj" in name or kv_a in name:
            tensors, values[name] = blocks.draw(tuple(plain[name].shape), 3)
        elif "o_proj" in name:
            tensors, values[name] = {"weight": plain[name]}, plain[name].double()
        else:
            continue
        stored = {each: tensor for each, tensor in stored.items() if not each.startswith(module)}
        stored |= {f"{module}{suffix}": tensor for suffix, tensor in tensors.items()}
    write_checkpoint(tmp_path, coded_config(four, quantization_config=config), stored)
    checkpoint = Checkpoint.open(tmp_path)
    forms = {name.split(".")[-2]: checkpoint.scheme(name) for name in plain}
    assert forms["o_proj"] is None and forms["kv_a_layernorm"] is None
    assert forms["q_a_proj"] == forms["q_b_proj"] == forms["kv_a_proj_with_mqa"]
    assert forms["q_a_proj"].format == "float-quantized" and forms["kv_b_proj"].format == "pack-quantized"
    assert all(close(checkpoint.weight(name, torch.float32), value, four) for name, value in values.items())


def test_the_block_may_stand_inside(tmp_path: pathlib.Path) -> None:
    form = FORMS["pack-quantized, groups"]
    values = write_coded(tmp_path, form, quantization_config=None)
    set_config(tmp_path, text_config={"quantization_config": form.config})
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values[KV_B], form)


def test_attention_left_as_it_was(tmp_path: pathlib.Path) -> None:
    """As in Kimi-K2-Thinking: experts in int4, attention in bfloat16, by expression."""
    form = FORMS["pack-quantized, groups"]
    config = config_v3(dtype="bfloat16", quantization_config=ct(form.config["config_groups"]["group_0"], ignore=(
        "re:.*self_attn.*", "re:.*shared_experts.*", "lm_head",
    )))  # fmt: skip
    expert, values = form.draw((16, 40), 0)
    prefix = "model.layers.0.mlp.experts.0.up_proj."
    weights = attention_weights(config, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, config, weights | {prefix + suffix: tensor for suffix, tensor in expert.items()})
    checkpoint = Checkpoint.open(tmp_path)
    assert not any(checkpoint.quantized(name) for name in weights)
    assert close(checkpoint.weight(f"{prefix}weight", torch.float32), values, form)
    assert set(checkpoint.state_dict()) == {*weights, f"{prefix}weight"}
    assert not any("codes" in note for note in convert(tmp_path, tmp_path / "out").notes)


def test_another_method_does_not_matter_where_attention_is_plain(tmp_path: pathlib.Path) -> None:
    config = config_v3(quantization_config={"quant_method": "hqq"})
    expert = {"model.layers.0.mlp.experts.0.up_proj.W_q": torch.ones(8, 4, dtype=torch.uint8)}
    write_checkpoint(tmp_path, config, attention_weights(config) | expert)
    checkpoint = Checkpoint.open(tmp_path)
    convert(checkpoint, tmp_path / "out")
    with pytest.raises(FormatError, match="weights that cannot be read: .*'hqq'"):
        checkpoint.state_dict()


def test_a_name_listed_that_is_none(tmp_path: pathlib.Path) -> None:
    """GLM-5's list has a module that is not there; what is stored in codes is read all the same."""
    form = FORMS["FP8 blocks"]
    given = form.config | {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"]}
    values = write_coded(tmp_path, form, quantization_config=given)
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values[KV_B], form)


@pytest.mark.parametrize("pattern", ["kv_b_proj", MODULE, "model.layers.0", "*kv_b*", "re:.*kv_b_proj"])
def test_codes_where_the_config_lists_none(pattern: str, tmp_path: pathlib.Path) -> None:
    form = FORMS["FP8 blocks"]
    write_coded(tmp_path, form, quantization_config=form.config | {"ignore": [pattern]})
    with pytest.raises(FormatError, match="self_attn.*_proj.* is stored in codes .*not quantized"):
        Checkpoint.open(tmp_path)


def test_codes_that_no_group_covers(tmp_path: pathlib.Path) -> None:
    group = FORMS["pack-quantized, groups"].config["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]}
    write_coded(tmp_path, FORMS["pack-quantized, groups"], quantization_config=ct(group))
    with pytest.raises(FormatError, match=r"_proj.*\.weight_packed holds codes in int32, and .* has nothing for it"):
        Checkpoint.open(tmp_path)


def test_modelopt_s_own_file(tmp_path: pathlib.Path) -> None:
    """hf_quant_config.json instead of a block in the config; layer by layer where precisions are mixed."""
    form = FORMS["ModelOpt NVFP4"]
    values = write_coded(tmp_path, form, quantization_config=None)
    inner: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.mlp.*"]}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values[KV_B], form)
    modules = [name.removesuffix(".weight") for name, value in values.items() if value.dim() == 2]
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict.fromkeys(modules, {"quant_algo": "NVFP4"})}
    file.write_text(json.dumps({"quantization": inner}))
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values[KV_B], form)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (fp8_config(weight_block_size=[128]), "weight_block_size = [128]"),
        (fp8_config(weight_block_size=[128, 0]), "weight_block_size = [128, 0]"),
        (fp8_config(weight_block_size=128), "weight_block_size = 128"),
        (fp8_config(fmt="e5m2"), "fmt = 'e5m2'"),
        (fp8_config(modules_to_not_convert="lm_head"), "modules_to_not_convert = 'lm_head'"),
        ({"bits": 4}, "without a quant_method"),
        ("fp8", "without a quant_method"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic settings for '+:.*'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo = 'W4A16_AWQ'"),
        (ct(ct_group("marlin-24", 4)), "format = 'marlin-24'"),
        (ct(ct_group("pack-quantized", 4, strategy="token")), "strategy = 'token'"),
        (ct(ct_group("float-quantized", 4, "float")), "weights of 4 bits of type 'float'"),
        (ct(ct_group("pack-quantized", 4, strategy="group")), "group_size = None"),
        (ct(ct_group("pack-quantized", 4), ignore=("re:(",)), "the expression '('"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_read(given: Any, words: str, tmp_path: pathlib.Path) -> None:
    write_coded(tmp_path, FORMS["pack-quantized, groups"], quantization_config=given)
    with pytest.raises(FormatError) as refused:
        Checkpoint.open(tmp_path)
    assert words in str(refused.value)


def test_sizes_cut_blocks_and_groups() -> None:
    """The forms are tried on sizes that no block or group divides."""
    config = config_v3(**SIZES)
    assert all(size % 16 for size in (config["hidden_size"], config["q_lora_rank"], config["kv_lora_rank"]))


def only_kv_b(folder: pathlib.Path, coded: Form, config: dict[str, Any]) -> torch.Tensor:
    """A checkpoint whose kv_b_proj is stored in a form, and the rest of its attention plain; gives the values."""
    plain = attention_weights(coded_config(coded), dtype=torch.bfloat16)
    tensors, values = coded.draw(tuple(plain.pop(KV_B).shape), 5)
    stored = plain | {f"{MODULE}.{suffix}": tensor for suffix, tensor in tensors.items()}
    write_checkpoint(folder, coded_config(coded, quantization_config=config), stored)
    return values


def test_groups_for_other_classes(tmp_path: pathlib.Path) -> None:
    """A projection is no Embedding, whichever group stands first."""
    form = FORMS["pack-quantized, groups"]
    group = form.config["config_groups"]["group_0"]
    eight = ct_group("int-quantized", 8, strategy="channel") | {"targets": ["Embedding", "DeepseekV3MoE"]}
    config = ct(group, overall="mixed-precision", ignore=("Embedding",))
    config["config_groups"] = {"group_0": eight, "group_1": group}
    values = only_kv_b(tmp_path, form, config)
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values, form)
    parsed = parse_quantization({"quantization_config": config})
    assert parsed is not None
    embedding = parsed.scheme("model.embed_tokens")
    assert embedding is not None and embedding.format == "int-quantized"
    assert parsed.ignores("model.embed_tokens") and not parsed.ignores("lm_head")


def test_of_two_expressions_the_first_in_the_alphabet_decides(tmp_path: pathlib.Path) -> None:
    """As compressed-tensors has it: not the first group."""
    from compressed_tensors.utils.match import match_targets

    form = FORMS["pack-quantized, groups"]
    group = form.config["config_groups"]["group_0"]
    eight = ct_group("int-quantized", 8, strategy="channel") | {"targets": ["re:.*self_attn.*"]}
    config = ct(group, overall="mixed-precision", ignore=())
    config["config_groups"] = {"group_0": eight, "group_1": group | {"targets": ["re:.*kv_b_proj"]}}
    theirs = match_targets(MODULE, torch.nn.Linear(1, 1), ["re:.*self_attn.*", "re:.*kv_b_proj"])
    assert theirs[0] == "re:.*kv_b_proj"
    values = only_kv_b(tmp_path, form, config)
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values, form)


def test_an_ignored_name_that_is_no_module_s(tmp_path: pathlib.Path) -> None:
    """compressed-tensors takes names for whole ones, and so quantizes what a part of a path was to leave out."""
    form = FORMS["pack-quantized, groups"]
    group = form.config["config_groups"]["group_0"]
    values = only_kv_b(tmp_path, form, ct(group, ignore=("self_attn.kv_b_proj", "lm_head")))
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values, form)
    for whole in (MODULE, "re:.*self_attn.kv_b_proj"):
        set_config(tmp_path, quantization_config=ct(group, ignore=(whole,)))
        with pytest.raises(FormatError, match="among the modules that are not quantized"):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize("where", ["input", "output"])
def test_weights_of_rotated_activations(where: str, tmp_path: pathlib.Path) -> None:
    """What is turned back when the model runs is no weight of the model's; a turn that is in the weights is."""
    form = FORMS["pack-quantized, groups"]

    def turned(location: str, *targets: str) -> dict[str, Any]:
        applied = [{"targets": list(targets), "location": location}]
        transforms = {"config_groups": {"R": {"type": "hadamard", "apply": applied}}}
        return ct(form.config["config_groups"]["group_0"]) | {"transform_config": transforms}

    values = only_kv_b(tmp_path, form, turned(f"weight_{where}", "Linear"))
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values, form)
    set_config(tmp_path, quantization_config=turned(where, "re:.*down_proj$"))
    assert close(Checkpoint.open(tmp_path).weight(KV_B, torch.float32), values, form)
    set_config(tmp_path, quantization_config=turned(where, "re:.*kv_b_proj$"))
    with pytest.raises(FormatError, match="kv_b_proj is among the modules whose activations .* rotates"):
        Checkpoint.open(tmp_path)
