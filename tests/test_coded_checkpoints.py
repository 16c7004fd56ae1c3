"""Every form of stored codes, against values that follow from its definition (tests/coded.py), and what is refused."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from coded import FORMS, Form, close, coded_config, ct, ct_group, draw_all, packed, write_coded
from models import relative
from spoiling import edit
from variants import config_v3, write_checkpoint

import mla_convert
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import FormatError, MismatchError
from mla_convert.storage import AbsorbedCheckpoint

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
MODULE = KV_B.removesuffix(".weight")


@pytest.mark.parametrize("name", FORMS)
def test_values(name: str, tmp_path: pathlib.Path) -> None:
    form = FORMS[name]
    values = write_coded(tmp_path, form)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.weight_names() == sorted(values)
    for each, expected in values.items():
        weight = checkpoint.weight(each, torch.float32)
        assert weight.shape == expected.shape == checkpoint.info(each).shape and weight.is_contiguous()
        assert close(weight, expected, form)
        assert checkpoint.quantized(each) == (expected.dim() == 2)
        by_default = checkpoint.weight(each)
        assert by_default.dtype == checkpoint.source_dtype(each) == torch.bfloat16
        assert torch.equal(by_default, weight.to(torch.bfloat16))
    stored = sum(tensor.nbytes for tensor in draw_all(form, coded_config(form))[0].values())
    assert sum(map(checkpoint.stored_bytes, checkpoint.weight_names())) <= stored


@pytest.mark.parametrize("name", FORMS)
def test_a_fault_in_any_part_shows(name: str, tmp_path: pathlib.Path) -> None:
    """Each part changed alone changes the values, and its digest: nothing that is stored is ignored."""
    write_coded(tmp_path, FORMS[name])
    checkpoint = Checkpoint.open(tmp_path)
    before, digests = checkpoint.weight(KV_B), checkpoint.companion_digests(KV_B)
    assert sorted(digests) == sorted(checkpoint.companions(KV_B))
    for part in (KV_B if KV_B in checkpoint.names() else None, *checkpoint.companions(KV_B)):
        if part is None or part.endswith(("weight_shape", "weight_format")):
            continue
        stored = (tmp_path / "model.safetensors").read_bytes()
        edit(tmp_path, lambda tensors, part=part: spoil(tensors, part))  # type: ignore[misc]
        spoilt = Checkpoint.open(tmp_path)
        assert not torch.equal(spoilt.weight(KV_B), before), part
        assert (spoilt.companion_digests(KV_B) != digests) == (part != KV_B)
        (tmp_path / "model.safetensors").write_bytes(stored)


def spoil(tensors: dict[str, torch.Tensor], part: str) -> None:
    """Another value in the first element, of the same kind."""
    tensor = tensors[part]
    if part.endswith("g_idx"):
        tensor[0] = 1 - tensor[0].clamp(max=1)
    elif tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.reshape(-1)[0] *= 2
    else:
        bytes_ = tensor.view(torch.uint8).reshape(-1)
        bytes_[0] = bytes_[0] ^ 8


def forward(config: dict[str, Any], state: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    plain = DeepseekV3Config(**{key: value for key, value in config.items() if key != "quantization_config"})
    model = DeepseekV3ForCausalLM(plain).to(torch.float32).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.arange(3, 19)[None]).logits


@pytest.mark.parametrize(
    "name",
    [
        "FP8 per row",
        "int-quantized, zero points",
        "pack-quantized, zero points",
        "ModelOpt NVFP4",
        "AWQ",
        "GPTQ, order",
    ],
)
def test_from_codes_to_a_patched_model(name: str, tmp_path: pathlib.Path) -> None:
    """convert, then load with the sidecar: the logits are those of the values by definition."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

    form = FORMS[name]
    config = coded_config(form, dtype="float32")
    torch.manual_seed(0)
    plain = DeepseekV3Config(**{key: value for key, value in config.items() if key != "quantization_config"})
    state = DeepseekV3ForCausalLM(plain).state_dict()
    stored, values = draw_all(form, config)
    rest = {key: tensor.clone() for key, tensor in state.items() if key not in values}
    write_checkpoint(tmp_path / "source", config, stored | rest)
    report = convert(tmp_path / "source", tmp_path / "out", vo="fused")
    assert any("codes of the source" in note for note in report.notes)
    store = AbsorbedCheckpoint.open(tmp_path / "out")
    store.check_source(Checkpoint.open(tmp_path / "source"))
    model = mla_convert.load(tmp_path / "source", tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(torch.arange(3, 18)[None], cache=cache)
        last = model(torch.tensor([[18]]), cache=cache).logits
    expected = forward(config, rest | {key: value.float() for key, value in values.items()})
    # float32 roundings of a model with one layer; a wrong group or zero point moves logits by a tenth of their range.
    assert relative(last[:, 0], expected[:, -1]) < 1e-5


def test_the_sidecar_knows_its_source(tmp_path: pathlib.Path) -> None:
    """One other zero point is another source, though the codes and the scales are the same."""
    write_coded(tmp_path / "source", FORMS["GPTQ, order"])
    convert(tmp_path / "source", tmp_path / "out")
    store = AbsorbedCheckpoint.open(tmp_path / "out")
    source = store.manifest.source.tensors[KV_B]
    assert source.form == "gptq, 4 bits, groups of 16, zero points +1"
    assert sorted(source.companions) == [f"{MODULE}.{suffix}" for suffix in ("g_idx", "qzeros", "scales")]
    edit(tmp_path / "source", lambda tensors: spoil(tensors, f"{MODULE}.qzeros"))
    with pytest.raises(MismatchError, match="has the codes that .* were made from, and other scales"):
        store.check_source(Checkpoint.open(tmp_path / "source"))


def test_odd_shapes_in_packed_words(tmp_path: pathlib.Path) -> None:
    """28 rows and 12 columns: neither fills its words of eight codes, and groups of 8 are cut."""
    form = Form(ct(ct_group("pack-quantized", 4, strategy="group", group_size=8, symmetric=False)),
                packed(4, 8, symmetric=False))  # fmt: skip
    config = config_v3(dtype="float32", quantization_config=form.config)
    stored, values = draw_all(form, config)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, stored))
    assert checkpoint.info(KV_B).shape == (28, 12)
    assert all(close(checkpoint.weight(name), expected, form) for name, expected in values.items())


def test_the_reciprocals_are_not_mixed_up(tmp_path: pathlib.Path) -> None:
    """The same bytes and the same overall factor: one library multiplies by it, the other divides."""
    for name, suffix in (("nvfp4-pack-quantized", "weight_global_scale"), ("ModelOpt NVFP4", "weight_scale_2")):
        folder = tmp_path / suffix
        write_coded(folder, FORMS[name])
        half = Checkpoint.open(folder).weight(KV_B, torch.float32)
        edit(folder, lambda tensors, suffix=suffix: tensors[f"{MODULE}.{suffix}"].mul_(2))  # type: ignore[misc]
        doubled = Checkpoint.open(folder).weight(KV_B, torch.float32)
        assert torch.equal(doubled, half * (2 if suffix == "weight_scale_2" else 0.5))


def test_zero_points_of_16(tmp_path: pathlib.Path) -> None:
    """GPTQ stores a zero point of 0 as 15, which is −1 in four bits, and not as 16."""
    write_coded(tmp_path, FORMS["GPTQ"])
    edit(tmp_path, lambda tensors: tensors[f"{MODULE}.qzeros"].fill_(-1))
    edit(tmp_path, lambda tensors: tensors[f"{MODULE}.qweight"].fill_(0))
    assert not Checkpoint.open(tmp_path).weight(KV_B).any()


def test_an_order_that_was_never_made(tmp_path: pathlib.Path) -> None:
    """All zeros in an index with several groups, and −1 in compressed-tensors', mean the order of the columns."""
    for name, suffix, fill in (("GPTQ", "g_idx", 0), ("pack-quantized, order", "weight_g_idx", -1)):
        folder = tmp_path / suffix
        write_coded(folder, FORMS[name])
        order = torch.arange(24) // 16
        results = []
        for index in (order, torch.full((24,), fill)):
            edit(folder, lambda t, s=suffix, i=index: t.update({f"{MODULE}.{s}": i.int()}))  # type: ignore[misc]
            results.append(Checkpoint.open(folder).weight(KV_B))
        assert torch.equal(*results)


def test_older_zero_points_are_not_packed(tmp_path: pathlib.Path) -> None:
    form = FORMS["pack-quantized, zero points"]
    write_coded(tmp_path, form)
    expected = Checkpoint.open(tmp_path).weight(KV_B)
    name = f"{MODULE}.weight_zero_point"

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        words = tensors[name].long() & 0xFFFFFFFF
        spread = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], 1)
        tensors[name] = (spread.reshape(-1, words.shape[1]) - 8).to(torch.int8)

    edit(tmp_path, unpack)
    assert torch.equal(Checkpoint.open(tmp_path).weight(KV_B), expected)


def swap(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({f"{MODULE}.{new}": tensors.pop(f"{MODULE}.{old}")})


def put(suffix: str, tensor: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({f"{MODULE}.{suffix}": tensor})


def take(suffix: str) -> Any:
    return lambda tensors: tensors.pop(f"{MODULE}.{suffix}")


REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("FP8 per row", take("weight_scale"), ("scale", "weight_scale_inv is missing")),
    ("FP8 per row", put("weight_scale_inv", torch.ones(40, 1)), ("weight_scale_inv", "are both there")),
    ("FP8 per row", put("weight_scale", torch.ones(39, 1)), ("weight_scale has shape [39, 1]", "[40, 1] or [40]")),
    ("int8 per row", put("weight_scale", torch.ones(40, 2)), ("weight_scale has shape [40, 2]",)),
    ("float-quantized, rows", put("weight_scale", torch.ones(1)), ("weight_scale has shape [1]", "[40, 1]")),
    ("float-quantized, blocks", put("weight_scale", torch.ones(2, 2)), ("needs [3, 2]", "blocks of [16, 16]")),
    ("int-quantized, rows", put("weight_zero_point", torch.ones(40, 1).to(torch.int8)), ("zero_point is surplus",)),
    ("int-quantized, zero points", take("weight_zero_point"), ("companion", "weight_zero_point is missing")),
    ("pack-quantized, groups", take("weight_shape"), ("weight_shape is missing",)),
    ("pack-quantized, groups", put("weight_shape", torch.tensor([24, 40])), ("weight_shape is [24, 40]", "[40, 24]")),
    ("pack-quantized, groups", put("weight_scale", torch.ones(40, 1)), ("has shape [40, 1]", "needs [40, 2]")),
    ("pack-quantized, groups", put("weight_scale", torch.full((40, 2), torch.nan)), ("weight_scale has 80 of 80",)),
    ("pack-quantized, groups", put("weight_scale", -torch.ones(40, 2)), ("weight_scale has 80 of 80",)),
    ("pack-quantized, groups", put("weight_packed", torch.ones(40, 3)), ("weight_packed holds codes in float32",)),
    ("pack-quantized, groups", swap("weight_packed", "weight"), ("weight is stored in int32",)),
    ("pack-quantized, order", put("weight_g_idx", torch.full((24,), 2).int()), ("24 of 24 columns", "the 2 that")),
    ("pack-quantized, order", put("weight_g_idx", torch.zeros(23).int()), ("weight_g_idx has shape [23]",)),
    ("nvfp4-pack-quantized", take("weight_global_scale"), ("weight_global_scale is missing",)),
    ("nvfp4-pack-quantized", swap("weight_global_scale", "weight_scale_2"), ("weight_global_scale is missing",)),
    ("nvfp4-pack-quantized", put("weight_scale_2", torch.ones(1)), ("weight_scale_2 is surplus",)),
    ("nvfp4-pack-quantized", put("weight_global_scale", torch.zeros(1)), ("weight_global_scale has 1 of 1",)),
    ("ModelOpt NVFP4", take("weight_scale_2"), ("weight_scale_2 is missing",)),
    ("ModelOpt NVFP4", put("weight_scale", torch.ones(40, 2)), ("weight_scale is stored in float32", "float8_e4m3fn")),
    ("ModelOpt NVFP4", put("pre_quant_scale", torch.ones(24)), ("pre_quant_scale is surplus",)),
    ("ModelOpt FP8", put("weight_scale", torch.ones(2, 2)), ("weight_scale has shape [2, 2]",)),
    ("AWQ", take("scales"), ("scales is missing",)),
    ("AWQ", take("qzeros"), ("qzeros is missing",)),
    ("AWQ", put("g_idx", torch.zeros(24).int()), ("g_idx is surplus",)),
    ("AWQ", put("scales", torch.ones(1, 40)), ("scales has shape [1, 40]", "needs [2, 40]")),
    ("GPTQ", put("qzeros", torch.ones(2, 4).int()), ("qzeros has shape [2, 4]", "needs [2, 5]")),
    ("GPTQ", put("g_idx", torch.full((24,), -1).int()), ("24 of 24 columns",)),
    ("GPTQ", put("perm", torch.zeros(24).int()), ("perm is surplus",)),
    ("bitsandbytes int8", take("SCB"), ("SCB is missing",)),
    ("bitsandbytes int8", put("SCB", torch.ones(39)), ("SCB has shape [39]",)),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED, ids=[f"{n}: {w[-1]}" for n, _, w in REFUSED])
def test_parts_that_do_not_belong_together(
    name: str, change: Any, words: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    write_coded(tmp_path, FORMS[name])
    edit(tmp_path, change)
    with pytest.raises(FormatError) as refused:
        Checkpoint.open(tmp_path).weight(KV_B)
    for word in ("kv_b_proj", *words):
        assert word in str(refused.value)
