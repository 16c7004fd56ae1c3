"""Projections that hold codes: each form is read as its formula has it, and patched models use what was read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from libraries import library
from patching import BOUND, layers, steps
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.patches.sources import effective_weight, reader_of

IDS = models.tokens(2, 9)
Made = tuple[nn.Module, Tensor]
"""A module in some form, and its weight in float64 by the form's formula."""


def blocks(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Each block's scale at each of its elements, partial blocks at the edges cut."""
    wide = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def fp8_linear(linear: nn.Linear, block: tuple[int, int] | None, scale_fmt: str = "float") -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    module = FP8Linear(linear.in_features, linear.out_features, block, scale_fmt=scale_fmt).requires_grad_(False)
    module.weight.data = (64 * linear.weight.detach()).to(torch.float8_e4m3fn)
    return module


def fp8_blocks(linear: nn.Linear) -> Made:
    module = fp8_linear(linear, (32, 16))
    module.weight_scale_inv.data.uniform_(0.005, 0.03)
    scale = blocks(module.weight_scale_inv.data, 32, 16, linear.weight.shape)
    return module, module.weight.data.double() * scale


def fp8_exponents(linear: nn.Linear) -> Made:
    module = fp8_linear(linear, (32, 16), "ue8m0")
    exponents = torch.randint(119, 123, module.weight_scale_inv.shape)
    module.weight_scale_inv.data = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return module, module.weight.data.double() * blocks(2.0 ** (exponents - 127), 32, 16, linear.weight.shape)


def fp8_tensor(linear: nn.Linear) -> Made:
    module = fp8_linear(linear, None)
    module.weight_scale_inv.data.fill_(0.011)
    return module, module.weight.data.double() * float(module.weight_scale_inv)


def torchao(kind: str, **given: Any) -> Callable[[nn.Linear], Made]:
    def make(linear: nn.Linear) -> Made:
        quantization = library("torchao.quantization")
        holder = nn.Sequential(copy.deepcopy(linear))
        quantization.quantize_(holder, getattr(quantization, kind)(**given))
        weight = holder[0].weight
        codes, scale = weight.qdata.double(), weight.scale.double()
        return holder[0], codes * scale.reshape(codes.shape[0], -1)

    make.__name__ = kind
    return make


def scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme.model_validate({"targets": ["Linear"], "weights": {"symmetric": True} | weights})


def compressed(compress: bool, groups: int, limit: float, **weights: Any) -> Callable[[nn.Linear], Made]:
    """compressed-tensors with ``groups`` scales a row; ``compress`` packs the codes, else each forward rounds anew."""

    def make(linear: nn.Linear) -> Made:
        from compressed_tensors.compressors import compress_module
        from compressed_tensors.quantization.lifecycle import initialize_module_for_quantization

        module = copy.deepcopy(linear)
        initialize_module_for_quantization(module, scheme(**weights))
        parts = module.weight.detach().unflatten(1, (groups, -1))
        scale = parts.abs().amax(-1) / limit
        module.weight_scale.data = scale
        exact = (parts.double() / scale[..., None].double()).float()
        codes = exact.round() if weights["type"] == "int" else exact.to(torch.float8_e4m3fn).float()
        if compress:
            compress_module(module)
        return module, (codes.double() * scale[..., None].double()).flatten(1)

    return make


def four_bits(kind: str, nested: bool) -> Callable[[nn.Linear], Made]:
    def make(linear: nn.Linear) -> Made:
        bnb = library("bitsandbytes")
        module = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type=kind)
        module.weight = bnb.nn.Params4bit(
            linear.weight.detach().clone(), requires_grad=False, quant_type=kind, compress_statistics=nested
        ).to("cpu")
        state = module.weight.quant_state
        packed = module.weight.data.flatten().int()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
        largest = state.absmax.double()
        if nested:
            outer = state.state2
            ratio = outer.absmax.double().repeat_interleave(outer.blocksize)[: largest.numel()]
            largest = outer.code.double()[state.absmax.long()] * ratio + state.offset.double()
        scale = largest.repeat_interleave(state.blocksize)[: codes.numel()]
        return module, (state.code.double()[codes] * scale).view(linear.weight.shape)

    return make


def eight_bits(linear: nn.Linear) -> Made:
    bnb = library("bitsandbytes")
    module = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    module.load_state_dict({"weight": linear.weight.detach().clone()})
    module = module.to("cpu")
    return module, module.weight.CB.double() * module.weight.SCB.double()[:, None] / 127


FP8 = "transformers' FP8Linear"
FORMS: dict[str, tuple[str, Callable[[nn.Linear], Made]]] = {
    "fp8-blocks": (FP8, fp8_blocks),
    "fp8-exponents": (FP8, fp8_exponents),
    "fp8-tensor": (FP8, fp8_tensor),
    "torchao-int8": ("torchao weights", torchao("Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": ("torchao weights", torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao-float8": ("torchao weights", torchao("Float8WeightOnlyConfig")),
    "packed-int4": (
        "compressed-tensors modules",
        compressed(True, 5, 7, num_bits=4, type="int", strategy="group", group_size=8),
    ),
    "packed-int8": ("compressed-tensors modules", compressed(True, 1, 127, num_bits=8, type="int", strategy="channel")),
    "packed-float8": (
        "compressed-tensors modules",
        compressed(True, 1, 448, num_bits=8, type="float", strategy="channel"),
    ),
    "rounded-int8": (
        "compressed-tensors modules",
        compressed(False, 1, 127, num_bits=8, type="int", strategy="channel"),
    ),
    "nf4": ("bitsandbytes' Linear4bit", four_bits("nf4", False)),
    "nf4-nested": ("bitsandbytes' Linear4bit", four_bits("nf4", True)),
    "fp4": ("bitsandbytes' Linear4bit", four_bits("fp4", False)),
    "llm-int8": ("bitsandbytes' Linear8bitLt", eight_bits),
}


def linear_of(out: int = 84, into: int = 40) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(into, out, bias=False)
    nn.init.normal_(linear.weight, std=0.3)
    return linear


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_read_by_its_formula(name: str) -> None:
    label, make = FORMS[name]
    module, expected = make(linear_of())
    assert reader_of("it", module).label == label
    assert reader_of("it", module).shape(module) == (84, 40)
    found = effective_weight("it", module)
    assert found.dtype == torch.float32 and not found.requires_grad
    # A product (nested bitsandbytes: two and a sum) in float32: half a unit in the last place each.
    torch.testing.assert_close(found.double(), expected, rtol=3 * 2**-24, atol=0)
    assert torch.equal(effective_weight("it", module, torch.bfloat16), found.bfloat16())


def put(model: PreTrainedModel, name: str, make: Callable[[nn.Linear], Made]) -> PreTrainedModel:
    """``model`` with each layer's projection ``name`` in a form; its twin has the plain weight of the formula."""
    twin = copy.deepcopy(model)
    put_beside(model, twin, name, make)
    return twin


def put_beside(model: PreTrainedModel, twin: PreTrainedModel, name: str, make: Callable[[nn.Linear], Made]) -> None:
    for layer, other in zip(model.model.layers, twin.model.layers, strict=True):
        module, weight = make(getattr(layer.self_attn, name))
        setattr(layer.self_attn, name, module)
        getattr(other.self_attn, name).weight.data = weight.float()


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_a_model_is_what_its_numbers_say(name: str) -> None:
    """Absorbed throughout, so that no form needs a forward of its own on a CPU."""
    label, make = FORMS[name]
    model = models.deepseek_v3()
    twin = put(model, "kv_b_proj", make)
    expected = steps(twin, IDS, DynamicCache(), [6, 1, 1, 1])
    with mla_convert.patched(model, prefill_threshold=16) as handle:
        found = steps(model, IDS, DynamicCache(), [6, 1, 1, 1])
        assert f"the model itself, through {label}" in str(handle.describe())
    assert models.relative(found, expected) <= BOUND


def decompress(model: nn.Module, args: Any) -> None:
    """What compressed-tensors registers on models that it loads."""
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationStatus

    for module in model.modules():
        if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
            decompress_module(module)


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_prefill_by_the_module_itself(name: str) -> None:
    """As models run by default: prefill goes through the module, which may repack its weight, and decode follows."""
    # The weights themselves are read and run absorbed in the tests above; what cannot run is the module's own forward.
    if name.startswith("fp8"):
        pytest.skip("transformers' FP8Linear has no CPU path: its forward is a Triton or DeepGEMM kernel")
    _, make = FORMS[name]
    model = models.deepseek_v3()
    twin = put(model, "kv_b_proj", make)
    if name.startswith("packed"):
        model.register_forward_pre_hook(decompress)
    own = steps(copy.deepcopy(model), IDS, DynamicCache(), [6, 1, 1, 1])
    expected = steps(twin, IDS, DynamicCache(), [6, 1, 1, 1])
    with mla_convert.patched(model):
        found = steps(model, IDS, DynamicCache(), [6, 1, 1, 1])
    # Some forms round their inputs as well, or compute in bfloat16; decoding must add nothing to what prefill does.
    assert models.relative(found, expected) <= max(BOUND, 2 * models.relative(own, expected))


@pytest.mark.parametrize("name", ["fp8-blocks", "packed-int8", "torchao-int8", "llm-int8"])
@torch.no_grad()
def test_fused_products_of_codes(name: str) -> None:
    _, make = FORMS[name]
    dims = models.BOTH_FUSED | {"v_head_dim": 40, "num_attention_heads": 2, "num_key_value_heads": 2}
    model, twin = models.deepseek_v3(**dims), models.deepseek_v3(**dims)
    for part in ("kv_b_proj", "q_b_proj", "o_proj"):
        put_beside(model, twin, part, make)
    expected = steps(twin, IDS, DynamicCache(), [6, 1, 1, 1])
    with mla_convert.patched(model) as handle:
        assert (handle.describe().qk_form, handle.describe().vo_form) == ("factored", "factored")
    with mla_convert.patched(model, form="fused", prefill_threshold=16):
        found = steps(model, IDS, DynamicCache(), [6, 1, 1, 1])
    assert models.relative(found, expected) <= BOUND


@pytest.mark.parametrize("name", ["fp8-blocks", "torchao-int8", "packed-int4", "nf4", "llm-int8"])
@torch.no_grad()
def test_edits_of_codes_and_scales(name: str) -> None:
    """Each of the tensors that the weight follows from is watched, edits through ``data`` included."""
    _, make = FORMS[name]
    model = models.deepseek_v3()
    put(model, "kv_b_proj", make)
    module = model.model.layers[1].self_attn.kv_b_proj
    with mla_convert.patched(model, prefill_threshold=16):
        before = steps(model, IDS, DynamicCache(), [6, 1, 1, 1])
        parts = reader_of("it", module).parts(module)
        scales = [part for part in parts.values() if part.dtype == torch.float32 and part.dim() < 3]
        for part in scales if name != "torchao-int8" else [module.weight.scale]:
            part.data.mul_(1.5)
        found = steps(model, IDS, DynamicCache(), [6, 1, 1, 1])
        twin = models.deepseek_v3()
        for layer, other in zip(model.model.layers, twin.model.layers, strict=True):
            other.self_attn.kv_b_proj.weight.data = effective_weight("it", layer.self_attn.kv_b_proj)
    assert models.relative(found, steps(twin, IDS, DynamicCache(), [6, 1, 1, 1])) <= BOUND
    assert models.relative(found, before) > 1e-3


def test_what_cannot_be_read_is_refused() -> None:
    damaged = fp8_linear(linear_of(), (32, 16))
    damaged.weight_scale_inv.data = damaged.weight_scale_inv.data[:-1].fill_(1)
    four = fp8_linear(linear_of(), (32, 16))
    four.weight.data = four.weight.data.view(torch.int8)
    four.weight_scale_inv.data.fill_(1)

    class QuantLinear(nn.Module):
        """As GPTQ's and AWQ's are: codes under other names."""

    integers = linear_of()
    integers.weight = nn.Parameter(integers.weight.data.to(torch.int32), requires_grad=False)
    cases = [
        (QuantLinear(), r"kv_b_proj is a .*QuantLinear; supported are .*FP8Linear.*load the model dequantized"),
        (damaged, r"kv_b_proj: \w+ has shape \[2, 3\].*needs \[3, 3\]"),
        (four, "kv_b_proj: .*int8"),
        (integers, "kv_b_proj.weight is int32; supported are"),
    ]
    for module, message in cases:
        model = models.deepseek_v3()
        model.model.layers[1].self_attn.kv_b_proj = module
        with pytest.raises(PatchError, match=message):
            mla_convert.patch(model)
        assert not layers(model)


def test_torchao_weights_without_a_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.deepseek_v3()
    put(model, "kv_b_proj", FORMS["torchao-int8"][1])

    def dequantize(self: Any) -> Tensor:
        raise NotImplementedError("no dequantize here")

    monkeypatch.setattr(type(model.model.layers[0].self_attn.kv_b_proj.weight), "dequantize", dequantize)
    with pytest.raises(PatchError, match=r"kv_b_proj: torchao's Int8Tensor has no way back.*leave kv_b_proj out"):
        mla_convert.patch(model)


@pytest.mark.parametrize("name", ["llm-int8", "nf4"])
@torch.no_grad()
def test_adapters_on_codes(name: str) -> None:
    """As QLoRA has it: the sum of what the codes say and of the adapters."""
    peft = library("peft")
    _, make = FORMS[name]
    model = models.deepseek_v3()
    twin = put(model, "kv_b_proj", make)
    adapters = []
    for one in (model, twin):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["kv_b_proj"])
        peft.inject_adapter_in_model(config, one)
        one.eval()
        adapters.append({n: p for n, p in one.named_parameters() if "lora_" in n})
    for name, parameter in adapters[1].items():
        parameter.data = adapters[0][name].data.clone()
    expected = steps(twin, IDS, DynamicCache(), [6, 1, 1, 1])
    with mla_convert.patched(model, prefill_threshold=16) as handle:
        assert "LoRA adapters of PEFT" in str(handle.describe())
        assert models.relative(steps(model, IDS, DynamicCache(), [6, 1, 1, 1]), expected) <= BOUND
