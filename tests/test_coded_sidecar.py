"""Patched models on quantized sidecars: the numbers they compute with, what they weigh, and what is refused."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
from typing import Any

import models
import pytest
import torch
from patching import layers, state_of, steps
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import MismatchError, SidecarError, UsageError
from mla_convert.patches import coded
from mla_convert.patches.coded import CPU_PRODUCTS
from mla_convert.patches.loading import load_original
from mla_convert.quality import coded_projections
from mla_convert.schemes import FP8_ROWS, INT8, Scheme, int4

IDS = torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(0))
#: Options of convert, and the scheme that they give both sides.
SCHEMES: dict[str, tuple[dict[str, Any], Scheme]] = {
    "int8": ({"quantize": "int8"}, INT8),
    "fp8": ({"quantize": "fp8", "group_size": "row"}, FP8_ROWS),
    "int4": ({"quantize": "int4"}, int4(32)),
}


@pytest.fixture(scope="module")
def folders(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A factored sidecar of each scheme."""
    base = tmp_path_factory.mktemp("coded")
    for name, (options, _) in SCHEMES.items():
        mla_convert.convert(example_path, base / name, form="factored", **options)
    return {name: base / name for name in SCHEMES}


@pytest.fixture(scope="module")
def original(example_path: pathlib.Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.float32).eval()


def decode(model: PreTrainedModel) -> torch.Tensor:
    return steps(model, IDS, DynamicCache(config=model.config), [6] + [1] * 6)[:, 6:]


@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_the_numbers_are_those_of_kv_b_proj_coded(
    name: str, folders: dict[str, pathlib.Path], original: PreTrainedModel
) -> None:
    """Rows and groups of a slice are those of the whole: absorbed or not, the model computes with the same weights."""
    scheme = SCHEMES[name][1]
    plain = decode(original)
    with mla_convert.patched(original, folders[name], prefill_threshold=100) as handle:
        found = decode(original)
        assert all(f"{scheme} dequantized once" in words for words in handle.describe().products)
    with coded_projections(original, scheme, scheme):
        expected = decode(original)
    assert models.relative(found, expected) <= 1e-4  # float32, other order of products
    assert models.relative(found, plain) > 1e-3  # and they are not the original's


@torch.inference_mode()
def test_codes_are_multiplied_in_16_bits(folders: dict[str, pathlib.Path], example_path: pathlib.Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16).eval()
    numbers = 4 * 8 * 32 * 64  # of one side: layers, heads, N or V, C
    plain_bytes = 2 * 2 * numbers
    # A side in codes: int8 with a scale for each row, int4 with one for each 32 numbers; else two bytes a number.
    codes = {"int8": numbers + 4 * numbers // 64, "int4": numbers // 2 + 4 * numbers // 32}
    for name in ("int8", "int4"):
        with mla_convert.patched(model, folders[name], prefill_threshold=100) as handle:
            described = handle.describe()
            kept = [(name, side) in CPU_PRODUCTS for side in ("key", "value")]
            for side, words, packed in zip(("key", "value"), described.products, kept, strict=True):
                assert words in str(described) and words.startswith(f"{side} side: ")
                assert ("multiplied as codes" in words) is packed and ("dequantized once" in words) is not packed
            expected = sum(codes[name] if packed else 2 * numbers for packed in kept)
            assert sum(buffer.nbytes for layer in layers(model) for buffer in layer.buffers()) == expected
            found = decode(model).float()
        with mla_convert.patched(model, prefill_threshold=100) as handle:
            assert not handle.describe().products
            assert sum(buffer.nbytes for layer in layers(model) for buffer in layer.buffers()) == plain_bytes
        scheme = SCHEMES[name][1]
        exact = load_original(example_path, dtype=torch.float32)
        with coded_projections(exact, scheme, scheme):
            expected_logits = decode(exact)
        # The original in bfloat16 is as far from itself in float32.
        bound = 2 * float(
            (decode(model).float() - decode(load_original(example_path, dtype=torch.float32))).abs().mean()
        )
        assert float((found - expected_logits).abs().mean()) <= bound


def held(model: PreTrainedModel) -> int:
    """Bytes of everything that the absorbed weights of a model keep alive: whole storages, each once."""
    buffers = [buffer for layer in layers(model) for buffer in layer.buffers()]
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    assert sum(storages.values()) == sum(buffer.nbytes for buffer in buffers)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_kept_codes_are_all_that_is_held(
    name: str, dtype: torch.dtype, folders: dict[str, pathlib.Path], example_path: pathlib.Path
) -> None:
    """A step leaves nothing behind, and its numbers are those of ``kv_b_proj`` coded."""
    numbers = 4 * 8 * 32 * 64  # of one side: layers, heads, N or V, C
    groups = 2 if name == "int4" else 1  # of a row, each with a scale
    expected_bytes = 2 * (numbers // (2 if name == "int4" else 1) + 4 * groups * numbers // 64)
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype).eval()
    plain = decode(model).float()
    before = state_of(model)
    with mla_convert.patched(model, folders[name], codes="keep", prefill_threshold=100) as handle:
        packed = {"int8": (True, True), "fp8": (False, False), "int4": (False, True)}[name]
        for words, by_codes in zip(handle.describe().products, packed, strict=True):
            by_codes = by_codes and dtype == torch.bfloat16
            assert str(SCHEMES[name][1]) in words and words in str(handle.describe())
            assert ("multiplied as codes" in words) is by_codes and words.endswith("at each call") is not by_codes
        assert held(model) == expected_bytes
        found = decode(model).float()
        assert held(model) == expected_bytes
        handle.warmup()
        assert handle.describe().products
    assert state_of(model) == before and torch.equal(decode(model).float(), plain)
    exact = load_original(example_path, dtype=torch.float32)
    original = decode(exact)
    with coded_projections(exact, *[SCHEMES[name][1]] * 2):
        expected = decode(exact)
    if dtype == torch.float32:
        assert models.relative(found, expected) <= 1e-4  # float32, other order of products
    else:  # as far as the original in this dtype is from itself in float32
        assert float((found - expected).abs().mean()) <= 2 * float((plain - original).abs().mean())


@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_kept_codes_stay_when_the_model_is_cast_or_copied(
    name: str, folders: dict[str, pathlib.Path], example_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16).eval()
    handle = mla_convert.patch(model, folders[name], codes="keep", prefill_threshold=100)
    codes = [[side.weight() for side in (layer.coded_qk, layer.coded_vo)] for layer in layers(model)]
    size, first = held(model), decode(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(decode(twin), first) and held(twin) == size
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        model.to(dtype)
        found = decode(model)
        assert held(model) == size
        for layer, sides in zip(layers(model), codes, strict=True):
            for now, stored in zip((layer.coded_qk, layer.coded_vo), sides, strict=True):
                assert torch.equal(now.weight().codes, stored.codes)
                assert torch.equal(now.weight().scales, stored.scales)
    assert "at each call" not in str(handle.describe()) or name != "int8"
    del found
    assert not caplog.records
    handle.refresh()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "let go" in caplog.text
    assert not handle.describe().products and held(model) > size
    fresh = decode(model)
    handle.unpatch()
    with mla_convert.patched(model, form="factored", prefill_threshold=100):
        assert torch.equal(decode(model), fresh)


@torch.inference_mode()
def test_changed_weights_give_kept_codes_up(
    folders: dict[str, pathlib.Path], original: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(original)
    handle = mla_convert.patch(model, folders["fp8"], codes="keep", prefill_threshold=100)
    decode(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(1.25)
    found = decode(model)
    assert not handle.describe().products
    assert len(caplog.records) == 1 and "codes='keep'" in caplog.text  # once, and not for every layer
    handle.unpatch()
    assert models.relative(found, decode(model)) <= 1e-4


def test_codes_to_keep_must_be_there(
    folders: dict[str, pathlib.Path], original: PreTrainedModel, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    mla_convert.convert(example_path, tmp_path / "plain")
    mla_convert.convert(example_path, tmp_path / "half", form="factored", vo_bits=8)
    before = state_of(original)
    for arguments, words in (
        ((), "no folder of absorbed weights was given: write one with convert and quantize, or leave codes out"),
        ((tmp_path / "plain",), "plain holds plain numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            mla_convert.patch(original, *arguments, codes="keep")
        assert state_of(original) == before
    with mla_convert.patched(original, tmp_path / "half", codes="keep") as handle:
        assert handle.describe().products == ("value side: int8 per row dequantized at each call",)
    loaded = mla_convert.load(example_path, folders["int8"], dtype=torch.bfloat16, patching={"codes": "keep"})
    assert all(layer.coded_qk is not None for layer in layers(loaded))


@pytest.mark.parametrize(
    ("name", "dtype"), [("int8", torch.float32), ("fp8", torch.bfloat16), ("int4", torch.bfloat16)]
)
@torch.inference_mode()
def test_fused_codes_are_kept_too(
    name: str, dtype: torch.dtype, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    mla_convert.convert(example_path, tmp_path / "out", form="fused", **SCHEMES[name][0])
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype).eval()
    with mla_convert.patched(model, tmp_path / "out", prefill_threshold=100):
        once, size = decode(model).float(), held(model)
    with mla_convert.patched(model, tmp_path / "out", codes="keep", prefill_threshold=100):
        assert held(model) < 0.7 * size
        found = decode(model).float()
    # The same codes: in float32 only the order of sums differs, in bfloat16 the rounding of what they stand for.
    assert models.relative(found, once) <= (1e-4 if dtype == torch.float32 else 0.1)


@torch.inference_mode()
def test_fused_sides_are_coded_too(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype).eval()
        plain = decode(model).float()
        out = tmp_path / "out"
        if not out.exists():
            report = mla_convert.convert(example_path, out, form="fused", quantize="int8")
            assert [tensor.name.split(".")[-2] for tensor in report.tensors[:2]] == ["qk_absorbed", "ov_absorbed"]
        with mla_convert.patched(model, out):
            found = decode(model).float()
            packed = dtype == torch.bfloat16 and ("int8", "fused") in CPU_PRODUCTS
            assert all((layer.coded_qk is not None) == packed for layer in layers(model))
        # int8 rows are off by 2 ** −8 of the largest number of a row at most.
        assert 0 < float((found - plain).abs().mean()) <= 0.02 * float(plain.max() - plain.min())


def edit_codes(folder: pathlib.Path, name: str, row: int) -> None:
    shard = next(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    codes = tensors[name].view(torch.uint8)
    codes[row, 3] ^= 0x40
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "part"), [("int8", "weight"), ("int4", "weight_packed")])
def test_a_damaged_code_is_found(
    name: str, part: str, example_path: pathlib.Path, tmp_path: pathlib.Path, original: PreTrainedModel
) -> None:
    for dtype, error in ((torch.bfloat16, SidecarError), (torch.float32, MismatchError)):
        out = tmp_path / str(dtype)
        mla_convert.convert(example_path, out, form="factored", **SCHEMES[name][0])
        edit_codes(out, f"model.layers.2.self_attn.v_b_proj.{part}", 7)
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype)
        with pytest.raises(error, match=r"layer 2: .*value rows of kv_b_proj"):
            mla_convert.patch(model, out)


def test_other_weights_are_refused(folders: dict[str, pathlib.Path], example_path: pathlib.Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype)
        with torch.no_grad():
            model.model.layers[1].self_attn.kv_b_proj.weight[40, 3] += 0.5
        for folder in folders.values():
            with pytest.raises(MismatchError, match="layer 1"):
                mla_convert.patch(model, folder)
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype)
        with torch.no_grad():
            model.model.layers[3].self_attn.kv_b_proj.weight.mul_(1.05)
        for folder in folders.values():
            with pytest.raises(MismatchError, match="layer 3"):
                mla_convert.patch(model, folder)


@torch.inference_mode()
def test_casting_keeps_the_codes_and_changed_weights_give_them_up(
    folders: dict[str, pathlib.Path], example_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("key", "value"):
        monkeypatch.setitem(CPU_PRODUCTS, ("int8", side), coded.INT8)
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16).eval()
    mla_convert.patch(model, folders["int8"], prefill_threshold=100)
    twin = copy.deepcopy(model)
    assert torch.equal(decode(twin), decode(model))
    assert all(layer.coded_qk is not None and layer.coded_vo is not None for layer in layers(twin))
    twin.half()
    pairs = list(zip(layers(twin), layers(model), strict=True))
    assert all(torch.equal(a.coded_qk.codes, b.coded_qk.codes) for a, b in pairs)
    assert all(a.coded_vo.scales.dtype == torch.float32 for a, _ in pairs)
    decode(twin)
    assert all(layer.products for layer in layers(twin))  # what runs in float16 still comes from the codes
    model.float()
    decode(model)
    assert all(layer.coded_qk is None and layer.products for layer in layers(model))
    assert "dequantized once" in mla_convert.patches.PatchHandle(model).describe().products[0]
    expected = load_original(example_path, dtype=torch.float32)
    with coded_projections(expected, INT8, INT8):
        assert models.relative(decode(model), decode(expected)) <= 1e-4
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(1.25)
    found = decode(model)
    assert all(not layer.products for layer in layers(model))
    for layer in expected.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(1.25)
    assert models.relative(found, decode(expected)) <= 1e-4


def test_an_edited_manifest_is_refused(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    mla_convert.convert(example_path, tmp_path / "out", quantize="int8", qk="factored", vo="factored")
    file = tmp_path / "out" / "mla_manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["quantization"]["quant_method"] == "compressed-tensors"
    for edit, message in (
        (
            lambda m: m["layers"][0]["tensors"]["k_b"].pop("quantization"),
            "is int8 .* says bfloat16",
        ),
        (lambda m: m["layers"][0]["tensors"]["k_b"]["quantization"].update(kind="int3"), "known are int8 per row"),
        (lambda m: m.update(quantization=None), "quantization that is not that of its tensors"),
    ):
        changed = copy.deepcopy(manifest)
        edit(changed)
        file.write_text(json.dumps(changed))
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.float32)
        with pytest.raises(SidecarError, match=message):
            mla_convert.patch(model, tmp_path / "out")
