"""Every family of the table: patched, converted and loaded, its logits are the unpatched model's."""

from __future__ import annotations

import functools
import importlib.resources
import json
import pathlib
import re
from typing import Any

import family_models
import older
import pytest
import torch
from family_models import AVAILABLE, SIZES, both, tokens
from models import worst
from patching import BOUND, state_of
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

import mla_convert
from mla_convert.architectures import FAMILIES, layer_specs, normalize_config
from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import UsageError
from mla_convert.forms import reads
from mla_convert.patches.loading import load_original
from mla_convert.patches.modules import module_geometry
from mla_convert.patches.recognition import attention_modules
from mla_convert.stages import counted_calls


@functools.cache
def model_of(model_type: str) -> PreTrainedModel:
    return family_models.make(model_type)


@functools.cache
def expected(model_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a model of its own with the same weights: the other may be patched when this is first asked for."""
    with torch.inference_mode():
        return both(family_models.make(model_type))


def largest(found: tuple[torch.Tensor, ...], model_type: str) -> float:
    return worst(found, expected(model_type))


#: Rows in the quick tests of what all rows are put through in the slow ones.
QUICK = ("glm_moe_dsa", "mistral4", "hy_v4", "axk2")
#: Changes that make each side read less fused, where the general ones are not enough.
NARROW: dict[str, dict[str, Any]] = {
    "dots3_note": {"swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 32, "swa_head_dim": 42, "swa_v_head_dim": 32},
}


def test_every_row_has_a_model() -> None:
    assert list(family_models.MODELS) == list(FAMILIES)
    assert AVAILABLE == list(FAMILIES) or older.RELEASE < older.RENAMED


def mla_classes(source: str) -> set[str]:
    """Classes of a modelling file that have the seam and the projection of MLA."""
    classes = re.split(r"^class ", source, flags=re.MULTILINE)[1:]
    return {
        match[0]
        for text in classes
        if "def expand_kv" in text and "self.kv_b_proj" in text and (match := re.match(r"\w+", text))
    }


def test_the_table_has_every_mla_class_of_transformers() -> None:
    files = importlib.resources.files("transformers.models")
    assert isinstance(files, pathlib.Path)
    sources = [path.read_text("utf-8") for path in files.glob("*/modeling_*.py")]
    found = {name for source in sources if "kv_b_proj" in source for name in mla_classes(source)}
    rows = {family.attention_class for name, family in FAMILIES.items() if name in CONFIG_MAPPING}
    assert found == rows, "a family is missing in the table"


def test_a_new_class_would_be_noticed() -> None:
    new = "class New(nn.Module):\n    def __init__(self):\n        self.kv_b_proj = 1\n\n    def expand_kv(self): ..."
    assert mla_classes(f"class Other:\n    pass\n\n\n{new}\n\n\nclass Last:\n    self.kv_b_proj = 2") == {"New"}


@pytest.mark.parametrize("run", [0, 1], ids=["whole", "padded"])
def test_nan_in_either_run_is_noticed(run: int) -> None:
    found = [logits.clone() for logits in expected("deepseek_v3")]
    assert largest(tuple(found), "deepseek_v3") == 0
    found[run][-1] = torch.nan
    with pytest.raises(AssertionError):
        largest(tuple(found), "deepseek_v3")


@pytest.mark.parametrize("model_type", AVAILABLE)
@torch.inference_mode()
def test_logits_and_tokens_are_the_same(model_type: str) -> None:
    model, ids = model_of(model_type), tokens()
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    generated, plain = model.generate(ids[:, :9], **options), expected(model_type)
    with mla_convert.patched(model):
        assert torch.equal(model.generate(ids[:, :9], **options), generated)
    before = state_of(model)
    with mla_convert.patched(model) as handle:
        assert handle.describe().family == model_type
        assert handle.describe().layers == tuple(name for name, _ in attention_modules(model))
        with counted_calls(model) as calls:
            assert largest(both(model), model_type) <= BOUND
        # In each of the two runs the single tokens ran absorbed, and the prefill expanded.
        assert all(2 * SIZES.count(1) <= calls.absorbed[name] < calls.all[name] for name in calls.all)
    assert state_of(model) == before
    assert all(torch.equal(a, b) for a, b in zip(both(model), plain, strict=True))


@pytest.mark.parametrize("model_type", AVAILABLE)
@torch.inference_mode()
def test_fused_where_it_may_be(model_type: str) -> None:
    model, family = model_of(model_type), FAMILIES[model_type]
    for side, name in (("qk", "key"), ("vo", "value")):
        if between := family.between(side):  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=f"the {name} side .* cannot be fused: {re.escape(between)}"):
                mla_convert.patch(model, **{side: "fused"})
    forms = {side: "factored" if family.between(side) else "fused" for side in ("qk", "vo")}  # type: ignore[arg-type]
    with mla_convert.patched(model, **forms) as handle:
        described = handle.describe()
        assert {"qk": described.qk_form, "vo": described.vo_form} == forms
        assert largest(both(model), model_type) <= BOUND


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in AVAILABLE]
)
@torch.inference_mode()
def test_auto_where_fused_reads_less(model_type: str, tmp_path: pathlib.Path) -> None:
    """At a latent narrower than the heads, a side is fused unless it cannot be; converting and patching agree."""
    family = FAMILIES[model_type]
    forms = tuple("factored" if family.between(side) else "fused" for side in ("qk", "vo"))  # type: ignore[arg-type]
    narrow = {"kv_lora_rank": 16, "qk_nope_head_dim": 32, "v_head_dim": 32} | NARROW.get(model_type, {})
    model = family_models.make(model_type, **narrow)
    figures = [reads(module_geometry(module)) for _, module in attention_modules(model)]
    assert all((figure.qk.fewer, figure.vo.fewer) == ("fused", "fused") for figure in figures)
    before = both(model)
    with mla_convert.patched(model) as handle:
        described = handle.describe()
        assert (described.qk_form, described.vo_form) == forms
        assert worst(both(model), before) <= BOUND
    model.save_pretrained(tmp_path / "source")
    report = mla_convert.convert(tmp_path / "source", tmp_path / "out", dry_run=True)
    assert (report.qk.form, report.vo.form) == forms


@pytest.mark.parametrize("form", ["auto", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", AVAILABLE)
@torch.inference_mode()
def test_converted_and_loaded(model_type: str, form: str, tmp_path: pathlib.Path) -> None:
    """ "auto" is factored here; fused where it may be."""
    model, family = model_of(model_type), FAMILIES[model_type]
    forms = {side: "factored" if family.between(side) else form for side in ("qk", "vo")}  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "source")
    report = mla_convert.convert(tmp_path / "source", tmp_path / "out", dtype="float32", **forms)
    checkpoint = Checkpoint.open(tmp_path / "source")
    geometries = {module.layer_idx: module_geometry(module) for _, module in attention_modules(model)}
    assert {spec.index: spec.geometry for spec in checkpoint.layers} == geometries
    assert report.layers == len(geometries)
    loaded: Any = load_original(tmp_path / "source")
    loaded.set_experts_implementation("eager")
    assert type(loaded) is type(model)
    with mla_convert.patched(loaded, tmp_path / "out") as handle:
        assert handle.describe().weights_from == str(tmp_path / "out")
        assert largest(both(loaded), model_type) <= BOUND


@pytest.mark.parametrize("form", ["factored", "fused"])
@torch.inference_mode()
def test_deepseek_v2_with_a_query_rank(form: str, tmp_path: pathlib.Path) -> None:
    model = family_models.make("deepseek_v2", q_lora_rank=28)
    before = both(model)
    model.save_pretrained(tmp_path / "source")
    mla_convert.convert(tmp_path / "source", tmp_path / "out", dtype="float32", form=form)
    for folder in (None, tmp_path / "out"):
        with mla_convert.patched(model, folder, **({} if folder else {"form": form})) as handle:
            assert handle.describe().qk_form == form
            assert worst(both(model), before) <= BOUND


@pytest.mark.parametrize("model_type", AVAILABLE)
def test_specs_at_the_family_s_own_size(model_type: str) -> None:
    """From the values that no config leaves out, the layers, dimensions and scales that transformers makes of them."""
    family = FAMILIES[model_type]
    raw = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    text = raw[family.inner] if family.inner else raw
    for key in "layer_types kv_source_layers no_rope_layers per_layer_config rope_parameters indexer_types".split():
        text.pop(key, None)
    text.pop("mlp_layer_types", None)
    text |= {"num_layers": 9} if "num_layers" in text else {"num_hidden_layers": 9}
    config = CONFIG_MAPPING[model_type](**json.loads(json.dumps(raw)))
    with torch.device("meta"):
        model = AutoModel.from_config(getattr(config, family.inner) if family.inner else config)
    specs = layer_specs(normalize_config(raw))
    made = {module.layer_idx: module for _, module in attention_modules(model)}
    assert {spec.index: spec.geometry for spec in specs} == {i: module_geometry(m) for i, m in made.items()}
    for spec in specs:
        shapes = {name: tuple(p.shape) for name, p in made[spec.index].named_parameters()}
        words = {word: module for module, word in spec.words.items()}
        for name, shape in spec.shapes().items():
            *_, word, parameter = name.split(".")
            assert shapes[f"{words.get(word, word)}.{parameter}"] == shape
        assert spec.own_latent == ("kv_a_layernorm.weight" in shapes)
        # What "auto" takes for the families as they are published: their latents are wider than their heads.
        assert (reads(spec.geometry).qk.fewer, reads(spec.geometry).vo.fewer) == ("factored", "factored")
