"""Models in memory whose projections hold codes: verified and benchmarked against what the codes mean, or refused."""

from __future__ import annotations

import pathlib
from typing import Any

import models
import pytest
import torch
from libraries import library
from test_quantized_projections import FORMS, decompress, fp8_linear, linear_of, put
from torch import nn
from transformers import PreTrainedModel

import mla_convert
from mla_convert import sizes
from mla_convert.errors import UsageError
from mla_convert.judgement import VerificationReport
from mla_convert.patches.plain_copy import plain_copy
from mla_convert.patches.weights import AbsorbedWeights

#: What bitsandbytes' kernels for CPUs can multiply by: rows in 32s, a latent of whole blocks of 64.
DIMS = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}


def coded(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A small model with each layer's ``kv_b_proj`` in a form, which runs by itself where its library has kernels."""
    model: PreTrainedModel = models.deepseek_v3(**DIMS).to(dtype)
    put(model, "kv_b_proj", FORMS[name][1])
    if name.startswith("packed"):
        model.register_forward_pre_hook(decompress)
    return model


def few_positions(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> None:
    """128 in place of 4,096 in float32: judged with their sampling error, and in a second."""
    if dtype == torch.float32:
        monkeypatch.setattr(sizes, "MINIMUM", 128)


def verify(model: PreTrainedModel, **more: Any) -> VerificationReport:
    few = {"prefill": 8, "decode": 32} if model.dtype == torch.float32 else {}
    return mla_convert.verify(model, **few, **more)


@pytest.mark.parametrize(
    ("name", "dtype", "rule", "floor"),
    [
        ("packed-int8", torch.float32, "strict", None),
        ("nf4", torch.float32, "floor", "float32"),  # on a CPU with bfloat16 instructions it computes in that
        ("torchao-int8-dynamic", torch.float32, "floor", "float32"),  # rounds what it multiplies
        pytest.param("torchao-int8", torch.bfloat16, "floor", "bfloat16", marks=pytest.mark.slow),
        pytest.param("packed-float8", torch.bfloat16, "floor", "bfloat16", marks=pytest.mark.slow),
        pytest.param("nf4-nested", torch.bfloat16, "floor", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_verify(name: str, dtype: torch.dtype, rule: str, floor: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    few_positions(monkeypatch, dtype)
    ticks: list[tuple[int, int]] = []
    report = verify(coded(name, dtype), progress=lambda *tick: ticks.append(tick))
    assert report.passed, str(report)
    if name == "nf4" and not library("bitsandbytes").functional.has_avx512bf16():
        rule, floor = "strict", None  # it multiplies by the numbers that the codes mean
    assert (report.rule, report.floor_dtype) == (rule, floor)
    assert (rule == "strict") == all(stage.floor is None for stage in report.stages)
    assert f"holds codes ({FORMS[name][0]})" in report.notes[0]
    assert ticks == [(done, len(ticks)) for done in range(1, len(ticks) + 1)]


@pytest.mark.parametrize("name", ["packed-int8", "torchao-int8-dynamic"])
def test_verify_finds_codes_that_were_misread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too large on the value side of one layer, as a wrong scale would have it."""
    few_positions(monkeypatch)
    derive = AbsorbedWeights.derive

    def misread(self: AbsorbedWeights, owner: Any) -> None:
        derive(self, owner)
        if owner.layer_idx == 1:
            self.w_uv.mul_(1.1)

    monkeypatch.setattr(AbsorbedWeights, "derive", misread)
    assert not verify(coded(name)).passed


@pytest.mark.parametrize("name", ["packed-int8", "packed-float8", "nf4", "fp4", "torchao-float8"])
def test_bench(name: str) -> None:
    model = coded(name)
    report = mla_convert.bench(model, contexts=[33], repetitions=3)
    # bitsandbytes multiplies in bfloat16 on a CPU that has instructions for it: 2⁻⁸ of each product, half of it at most
    # in a sum that is averaged over; the others are float32 throughout.
    assert report.contexts[0].logit_difference <= (2**-7 if name.startswith(("nf", "fp4")) else 1e-4)
    assert report.patch.weights_from == f"the model itself, through {FORMS[name][0]}"


@pytest.mark.parametrize("name", ["llm-int8", "fp8-blocks"])
def test_what_its_own_library_cannot_run_here_is_refused(name: str) -> None:
    """bitsandbytes' int8 product on a CPU takes two dimensions, FP8Linear's is a kernel for GPUs."""
    words = rf"holds codes \({FORMS[name][0]}\), and cannot compute two tokens .*or the model's folder instead"
    for check in (mla_convert.verify, mla_convert.bench):
        with pytest.raises(UsageError, match=words):
            check(coded(name))


@pytest.mark.parametrize("name", FORMS)
def test_a_plain_copy_has_the_numbers_that_codes_mean(name: str) -> None:
    """Anywhere in the model; the codes themselves stay as they are."""
    model = models.deepseek_v3()
    twin = put(model, "kv_b_proj", FORMS[name][1])
    mlp, weight = FORMS[name][1](linear_of())
    model.model.layers[0].mlp.gate_proj = mlp
    twin.model.layers[0].mlp.gate_proj = nn.Linear(40, 84, bias=False)
    twin.model.layers[0].mlp.gate_proj.weight.data = weight.float()
    before = set(map(id, model.modules()))
    for dtype in (torch.float32, torch.bfloat16):
        found = dict(plain_copy(model, dtype).named_parameters())
        assert found.keys() == dict(twin.named_parameters()).keys()
        for key, expected in twin.named_parameters():
            assert found[key].dtype == (torch.float32 if "gate.weight" in key else dtype)  # a router's is kept
            # nested scales are a product and a sum in float32; bfloat16 rounds once more
            rounding = 2.0 ** (-22 if dtype == torch.float32 else -8)
            torch.testing.assert_close(found[key].float(), expected, rtol=rounding, atol=0, msg=key)
    assert set(map(id, model.modules())) == before and model.model.layers[0].mlp.gate_proj is mlp


def test_a_plain_copy_keeps_biases_and_what_transformers_keeps_wide() -> None:
    model = models.deepseek_v3().double()
    model._keep_in_fp32_modules_strict = {"q_a_layernorm"}
    linear = linear_of()
    linear.bias = nn.Parameter(torch.arange(84.0))
    model.model.layers[0].mlp.gate_proj, weight = FORMS["packed-int8"][1](linear)
    other = plain_copy(model, torch.bfloat16)
    assert other.model.layers[0].self_attn.q_a_layernorm.weight.dtype == torch.float64
    assert torch.equal(other.model.layers[0].mlp.gate_proj.bias, torch.arange(84.0).bfloat16())
    assert torch.equal(other.model.layers[0].mlp.gate_proj.weight, weight.bfloat16())


def test_other_codes_anywhere_are_refused() -> None:
    """None of these has a weight that could be read; a cast would take codes for numbers."""

    def experts(model: Any) -> None:
        model.model.layers[1].mlp.gate_up_proj = nn.Parameter(torch.ones(2, 3, 4).to(torch.float8_e4m3fn), False)

    def packed(model: Any) -> None:
        model.model.layers[0].mlp.register_buffer("qweight", torch.ones(3, 4, dtype=torch.int32))

    def four(model: Any) -> None:
        fp8 = fp8_linear(linear_of(), None)
        fp8.weight.data = fp8.weight.data.view(torch.int8)
        model.model.layers[0].mlp.gate_proj = fp8

    for spoil, words in (
        (experts, r"layers.1.mlp.gate_up_proj is float8_e4m3fn, codes of a form"),
        (packed, r"layers.0.mlp.qweight is int32, codes of a form"),
        (four, r"layers.0.mlp.gate_proj: an FP8Linear with codes in torch.int8"),
    ):
        model = models.deepseek_v3().bfloat16()
        spoil(model)
        with pytest.raises(UsageError, match=rf"{words}.*mla_convert.verify\(folder\)"):
            plain_copy(model, torch.float32)
        with pytest.raises(UsageError, match=r"mla_convert.verify\(folder\)|the model's folder instead"):
            mla_convert.verify(model)
    counting = models.deepseek_v3().bfloat16()
    counting.model.layers[0].mlp.register_buffer("seen", torch.ones(3, dtype=torch.int64))
    assert plain_copy(counting, torch.float32).model.layers[0].mlp.seen.dtype == torch.int64


def test_codes_of_a_folder_over_codes_in_memory(tmp_path: pathlib.Path) -> None:
    models.deepseek_v3().save_pretrained(tmp_path / "source")
    mla_convert.convert(tmp_path / "source", tmp_path / "out", form="factored", quantize="int8")
    model = models.deepseek_v3()
    put(model, "kv_b_proj", FORMS["packed-int8"][1])
    with pytest.raises(UsageError, match=r"holds codes already \(compressed-tensors modules\).*others: verify"):
        mla_convert.verify(model, tmp_path / "out")
