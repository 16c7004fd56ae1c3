"""Absorbed weights from disk: used where they belong, refused where they do not, with layer, tensor and error."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import CheckpointError, MismatchError, SidecarError, UsageError
from mla_convert.patches.loading import load_original

BOUND = 1e-4


def converted(source: pathlib.Path, folder: pathlib.Path, **options: Any) -> pathlib.Path:
    out = folder / ("-".join(f"{k}={v}" for k, v in options.items()) or "default")
    if not out.exists():
        mla_convert.convert(source, out, **options)
    return out


def decode(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    cache = DynamicCache()
    first = [model(ids[:, :-6], cache=cache).logits]
    return torch.cat(
        first + [model(ids[:, i : i + 1], cache=cache).logits for i in range(ids.shape[1] - 6, ids.shape[1])], 1
    )


@pytest.mark.parametrize("form", ["factored", "fused", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("path", ["example_path", "fp8_path", "native_path"])
@torch.inference_mode()
def test_every_source_form_and_dtype(
    path: str, dtype: str, form: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    source = request.getfixturevalue(path)
    out = converted(source, tmp_path, form=form, dtype=dtype)
    model = load_original(source, dtype=torch.float32, stored_dtype=getattr(torch, dtype))
    ids = torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    with mla_convert.patched(model, out) as handle:
        assert handle.describe().weights_from == str(out)
        found = decode(model, ids)
    # 16-bit products carry a rounding of 2 ** -9 each; a few of them add up along the layers.
    assert models.relative(found, expected) <= (0.05 if (form, dtype) == ("fused", "bfloat16") else BOUND)


V2_DIMS = {"kv_lora_rank": 16, "hidden_size": 72}
LARGER = {"kv_lora_rank": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 256, "hidden_size": 256}


@pytest.mark.parametrize(
    ("make", "dims", "forms"),
    [
        (models.deepseek_v3, models.KEY_FUSED, ("fused", "factored")),
        (models.deepseek_v3, models.VALUE_FUSED, ("factored", "fused")),
        (models.deepseek_v3, models.BOTH_FUSED, ("fused", "fused")),
        (models.deepseek_v3, LARGER, ("fused", "fused")),
        (models.deepseek_v2, V2_DIMS | {"qk_nope_head_dim": 32, "v_head_dim": 8}, ("fused", "factored")),
        (models.deepseek_v2, V2_DIMS | {"qk_nope_head_dim": 8, "v_head_dim": 32}, ("factored", "fused")),
        (models.deepseek_v2, V2_DIMS | {"qk_nope_head_dim": 32, "v_head_dim": 32}, ("fused", "fused")),
    ],
    ids=["key", "value", "both", "both-larger", "v2-key", "v2-value", "v2-both"],
)
@torch.inference_mode()
def test_geometries_whose_cheaper_form_is_fused(
    make: Any, dims: dict[str, int], forms: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    """Convert, patch, generate, compare and verify, each side alone and both."""
    make(**dims).save_pretrained(tmp_path / "model")
    mla_convert.convert(tmp_path / "model", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = models.tokens(2, 12)
    expected = model(ids).logits
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    tokens = model.generate(ids, **options)
    with mla_convert.patched(model, tmp_path / "out") as handle:
        described = handle.describe()
        assert (described.qk_form, described.vo_form) == forms
        assert models.relative(decode(model, ids), expected) <= BOUND
        assert torch.equal(model.generate(ids, **options), tokens)
    report = mla_convert.verify(tmp_path / "model", tmp_path / "out", prefill=12, decode=6, batch=2)
    assert report.passed and (report.rule, report.qk_form, report.vo_form) == ("strict", *forms)


def flip_one_bit(model: PreTrainedModel, name: str) -> None:
    weight = model.get_submodule(f"model.layers.2.self_attn.{name}").weight
    with torch.no_grad():
        weight.view(torch.int16)[5, 7] ^= 1


@pytest.mark.parametrize(
    ("name", "form"), [("kv_b_proj", "factored"), ("kv_b_proj", "fused"), ("q_b_proj", "fused"), ("o_proj", "fused")]
)
def test_one_changed_bit_is_refused(name: str, form: str, example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = converted(example_path, tmp_path, form=form)
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16)
    mla_convert.patch(model, out).unpatch()
    flip_one_bit(model, name)
    with pytest.raises(MismatchError, match=rf"layer 2: model\.layers\.2\.self_attn\.{name}\.weight.*relative error"):
        mla_convert.patch(model, out)
    assert not hasattr(model, "_mla_patch") and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "form"), [("kv_b_proj", "factored"), ("kv_b_proj", "fused"), ("q_b_proj", "fused"), ("o_proj", "fused")]
)
def test_a_cast_model_may_differ_by_rounding_only(
    name: str, form: str, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = converted(example_path, tmp_path, form=form)
    for dtype in (torch.float32, torch.float16, torch.float64):
        model = AutoModelForCausalLM.from_pretrained(example_path, dtype=dtype)
        mla_convert.patch(model, out).unpatch()
        block = model.get_submodule(f"model.layers.1.self_attn.{name}").weight.data[:64, :64]
        block.mul_(1.05)
        with pytest.raises(MismatchError, match="layer 1: .*relative error of .* rounding explains"):
            mla_convert.patch(model, out)


def test_one_changed_bit_shows_through_an_exact_cast(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = converted(example_path, tmp_path, form="factored")
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16)
    flip_one_bit(model, "kv_b_proj")
    with pytest.raises(MismatchError, match="layer 2: "):
        mla_convert.patch(model.float(), out)


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_damage_after_conversion_is_refused(form: str, example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The model's own weights are what they were; a stored number is not."""
    out = converted(example_path, tmp_path, form=form)
    file = next(out.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16)
    with pytest.raises(SidecarError, match="layer 3: .*damaged"):
        mla_convert.patch(model, out)


@pytest.mark.parametrize("change", ["drop", "empty"])
def test_a_manifest_that_names_no_sources_is_refused(
    change: str, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = converted(example_path, tmp_path)
    manifest = json.loads((out / "mla_manifest.json").read_text())
    if change == "drop":
        manifest["source"]["tensors"].popitem()
    else:
        manifest["layers"][3]["sources"] = []
    (out / "mla_manifest.json").write_text(json.dumps(manifest))
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16)
    with pytest.raises(SidecarError, match="made from|source"):
        mla_convert.patch(model, out)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "x"}, {"vocab_size": 10}, {"rms_norm_eps": "x"}, {"first_k_dense_replace": None}],
    ids=str,
)
@pytest.mark.parametrize("path", ["example_path", "fp8_path"])
def test_configs_that_transformers_cannot_use(
    path: str, change: dict[str, Any], request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(request.getfixturevalue(path), source)
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot build the model in .*take the config"):
        load_original(source)


def swap_layers(folder: pathlib.Path) -> None:
    """Layer 0 gets layer 1's absorbed weights, file and manifest in agreement."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        swapped = {
            n.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("layers.X.", "layers.1."): t
            for n, t in tensors.items()
        }
        save_file(swapped, file, metadata={"format": "pt"})


def test_another_layers_weights_are_refused(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = converted(example_path, tmp_path)
    swap_layers(out)
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.float32)
    with pytest.raises(MismatchError, match="layer 0: "):
        mla_convert.patch(model, out)


def test_other_dimensions_are_refused(tmp_path: pathlib.Path) -> None:
    models.deepseek_v3().save_pretrained(tmp_path / "a")
    out = converted(tmp_path / "a", tmp_path)
    with pytest.raises(MismatchError, match="v_head_dim 12 and 20"):
        mla_convert.patch(models.deepseek_v3(v_head_dim=20), out)
    with pytest.raises(MismatchError, match="no layer 2"):
        mla_convert.patch(models.deepseek_v3(num_hidden_layers=3, seed=0), shallow(out, tmp_path))
    with pytest.raises(UsageError, match="key side|qk side"):
        mla_convert.patch(models.deepseek_v3(), out, qk="fused")
    with pytest.raises(SidecarError, match="holds no absorbed weights|no mla_manifest"):
        mla_convert.patch(models.deepseek_v3(), tmp_path / "a")


def shallow(out: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A sidecar whose weights are those of the first layers of a deeper model."""
    model = models.deepseek_v3(num_hidden_layers=3, seed=0)
    model.save_pretrained(folder / "deep")
    deep = converted(folder / "deep", folder, form="factored")
    manifest = json.loads((deep / "mla_manifest.json").read_text())
    manifest["layers"] = manifest["layers"][:2]
    copy = folder / "shallow"
    shutil.copytree(deep, copy)
    (copy / "mla_manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("path", ["example_path", "fp8_path", "native_path"])
@torch.inference_mode()
def test_load_patches_and_finds_the_weights_inside(
    path: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(request.getfixturevalue(path), source)
    expected = load_original(source, dtype=torch.float32)
    model = mla_convert.load(source, dtype=torch.float32)
    ids = torch.randint(3, 1000, (1, 20), generator=torch.Generator().manual_seed(0))
    assert mla_convert.patches.apply.PatchHandle(model).describe().weights_from == "the model itself"
    assert models.relative(decode(model, ids), expected(ids).logits) <= BOUND
    mla_convert.convert(source, source)
    inside = mla_convert.load(source, dtype=torch.float32, patching={"prefill_threshold": 30})
    described = mla_convert.patches.apply.PatchHandle(inside).describe()
    assert described.weights_from == str(source) and described.prefill_threshold == 30
    assert models.relative(inside(ids).logits, expected(ids).logits) <= BOUND
