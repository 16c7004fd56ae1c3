"""LoRA adapters on the projections of a patched model: the next step follows what PEFT does, or fails and says why."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from libraries import library
from patching import BOUND, FORMS, layers, state_of
from transformers import DynamicCache, PreTrainedModel

import mla_convert
from mla_convert.errors import MismatchError, PatchError, StaleWeightsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TARGETS = ["kv_b_proj", "q_b_proj", "o_proj"]
IDS = models.tokens(2, 9)


def config(targets: list[str] = TARGETS, **more: Any) -> Any:
    given = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": targets} | more
    return library("peft").LoraConfig(**given)


def adapted(model: PreTrainedModel, *configs: Any) -> Any:
    """``model`` inside PEFT, with an adapter for each config: the first is named default, then a, b, …"""
    torch.manual_seed(1)
    first, *others = configs or (config(),)
    wrapped = library("peft").get_peft_model(model, first)
    for name, other in zip(("second", "third"), others, strict=False):
        wrapped.add_adapter(name, other)
    return wrapped.eval()


@torch.no_grad()
def step(model: Any, **kwargs: Any) -> torch.Tensor:
    """Logits of one decode step after a prefill of eight tokens."""
    cache = DynamicCache()
    model(input_ids=IDS[:, :8], cache=cache, **kwargs)
    return model(input_ids=IDS[:, 8:], cache=cache, **kwargs).logits


def switch(model: Any) -> None:
    model.set_adapter("second")


def use_both(model: Any) -> None:
    model.base_model.set_adapter(["default", "second"])


def merge(model: Any) -> None:
    model.merge_adapter()


def merge_safely(model: Any) -> None:
    model.merge_adapter(safe_merge=True)


def merge_one_of_two(model: Any) -> None:
    use_both(model)
    model.merge_adapter(["second"])


def merge_and_undo(model: Any) -> None:
    model.merge_adapter()
    step(model)
    model.unmerge_adapter()


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def disable_merged(model: Any) -> None:
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


def enable_again(model: Any) -> None:
    model.base_model.disable_adapter_layers()
    step(model)
    model.base_model.enable_adapter_layers()
    switch(model)


def rescale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.3)


def edit(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B.default" in name:
            parameter.data.mul_(-1.5)


def edit_base(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "kv_b_proj.base_layer" in name:
            parameter.data.mul_(1.2)


def load_state(model: Any) -> None:
    state = {name: 0.7 * tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    model.load_state_dict(state, strict=False)


def delete(model: Any) -> None:
    switch(model)
    model.delete_adapter("default")


def optimizer_step(model: Any) -> None:
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "lora_A.default" in n], lr=0.3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def unload(model: Any) -> None:
    model.unload()


def merge_and_unload(model: Any) -> None:
    model.merge_and_unload()


CHANGES = [
    switch,
    use_both,
    merge,
    merge_safely,
    merge_one_of_two,
    merge_and_undo,
    disable,
    disable_merged,
    enable_again,
    rescale,
    edit,
    edit_base,
    load_state,
    delete,
    optimizer_step,
    unload,
    merge_and_unload,
]
SAME = {merge, merge_safely, merge_and_undo, merge_and_unload}
"""Changes that leave the outputs as they were."""


def inner(model: Any) -> PreTrainedModel:
    return model.get_base_model()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
def test_the_next_step_follows(form: dict[str, str], change: Callable[[Any], None]) -> None:
    """Both ways round: patched under the adapters, and before they came."""
    plain = adapted(models.deepseek_v3(), config(), config(r=2))
    before = step(plain)
    patched = adapted(models.deepseek_v3(), config(), config(r=2))
    mla_convert.patch(patched, **form)
    assert models.relative(step(patched), before) <= BOUND
    change(plain)
    change(patched)
    base = inner(plain) if change not in (unload, merge_and_unload) else plain.base_model.model
    expected = step(base)
    assert models.relative(step(patched.base_model.model), expected) <= BOUND
    moved = models.relative(expected, before)
    assert moved <= BOUND if change in SAME else moved > 1e-2
    mla_convert.unpatch(patched.base_model.model)
    assert models.relative(step(patched.base_model.model), expected) <= BOUND


@pytest.mark.parametrize(
    "targets", [TARGETS, *(pytest.param([name], marks=pytest.mark.slow) for name in TARGETS)], ids=" ".join
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_adapters_that_come_and_go(form: dict[str, str], targets: list[str]) -> None:
    """Around a patched model, and away again; unpatching leaves the adapters, and nothing of ours."""
    untouched = adapted(models.deepseek_v3(), config(targets))
    expected = step(untouched)
    model = models.deepseek_v3()
    original = step(model)
    handle = mla_convert.patch(model, **form)
    step(model)
    wrapped = adapted(model, config(targets))
    assert models.relative(step(wrapped), expected) <= BOUND < models.relative(expected, original)
    twin = copy.deepcopy(wrapped)
    assert models.relative(step(twin), expected) <= BOUND
    wrapped.unload()
    assert models.relative(step(model), original) <= BOUND
    handle.unpatch()
    assert torch.equal(step(model), original)
    mla_convert.unpatch(twin)
    found, wanted = state_of(twin), state_of(untouched)
    assert {k: v[1] for k, v in found.items() if isinstance(v, tuple)} == {
        k: v[1] for k, v in wanted.items() if isinstance(v, tuple)
    }
    assert models.relative(step(twin), expected) <= BOUND


def test_adapters_without_a_peft_model() -> None:
    model, twin = models.deepseek_v3(), models.deepseek_v3()
    with mla_convert.patched(model):
        for one in (model, twin):
            torch.manual_seed(1)
            library("peft").inject_adapter_in_model(config(), one)
            one.eval()
        assert models.relative(step(model), step(twin)) <= BOUND


@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
def test_an_adapter_for_each_sequence(form: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """PEFT chooses them in hooks on its layers, which only the layers' own forwards run."""
    plain = adapted(models.deepseek_v3(), config(), config(r=2))
    patched = adapted(models.deepseek_v3(), config(), config(r=2))
    mla_convert.patch(patched, **form)
    names = ["second", "__base__"]
    expected = step(plain, adapter_names=names)
    assert models.relative(step(patched, adapter_names=names), expected) <= BOUND
    assert models.relative(expected, step(plain)) > 1e-2
    assert caplog.text.count("model.layers.0.self_attn: kv_b_proj") == 1 and "runs expanded" in caplog.text
    assert models.relative(step(patched), step(plain)) <= BOUND


@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
def test_dropout_in_an_adapter(form: dict[str, str]) -> None:
    """In training no one weight stands for the projection, and the module's own forward runs: the same draws."""
    plain = adapted(models.deepseek_v3(), config(lora_dropout=0.5))
    patched = adapted(models.deepseek_v3(), config(lora_dropout=0.5))
    mla_convert.patch(patched, **form)
    assert models.relative(step(patched), step(plain)) <= BOUND
    for model in (plain, patched):
        model.train()
    torch.manual_seed(2)
    expected = step(plain)
    torch.manual_seed(2)
    assert models.relative(step(patched), expected) <= BOUND
    torch.manual_seed(3)
    assert models.relative(step(plain), expected) > 1e-2


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    ("more", "what"), [({"use_dora": True}, "DoraLinearVariant"), ({"lora_bias": True}, "lora_bias=True")]
)
def test_adapters_that_are_more_than_a_product(more: dict[str, Any], what: str) -> None:
    """Refused while they count, at once or at the next step; followed once merged."""
    wrapped = adapted(models.deepseek_v3(attention_bias=True), config(["kv_b_proj"], **more))
    with pytest.raises(PatchError, match=rf"kv_b_proj: the adapter 'default' on this projection uses {what}.*merge"):
        mla_convert.patch(wrapped)
    assert not layers(wrapped)
    model = models.deepseek_v3(attention_bias=True)
    mla_convert.patch(model)
    late = adapted(model, config(["kv_b_proj"], **more))
    with pytest.raises(StaleWeightsError, match=f"kv_b_proj: .*{what}.*or unpatch"):
        step(late)
    if "use_dora" in more:
        late.merge_adapter()
        wrapped.merge_adapter()
        assert models.relative(step(late), step(wrapped)) <= BOUND
    mla_convert.unpatch(late)


def test_adapters_of_another_kind() -> None:
    kind = library("peft").IA3Config(target_modules=["kv_b_proj"], feedforward_modules=[], init_ia3_weights=False)
    with pytest.raises(
        PatchError, match=r"kv_b_proj is a peft\.tuners\.ia3\.layer\.Linear; supported are .*LoRA.*merge"
    ):
        mla_convert.patch(adapted(models.deepseek_v3(), kind))
    model = models.deepseek_v3()
    mla_convert.patch(model)
    wrapped = adapted(model, kind)
    with pytest.raises(StaleWeightsError, match="kv_b_proj was replaced by a Linear .*unpatch the model"):
        step(wrapped)


def test_weights_of_a_folder_do_not_belong_to_a_model_with_adapters(example_path: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    mla_convert.convert(example_path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(example_path)
    wrapped = adapted(model, config(["kv_b_proj"]))
    with pytest.raises(MismatchError, match=r"kv_b_proj.*adapters"):
        mla_convert.patch(wrapped, tmp_path / "out")
    with wrapped.disable_adapter():
        mla_convert.patch(wrapped, tmp_path / "out")
    handle_less = step(wrapped)
    mla_convert.unpatch(wrapped)
    assert models.relative(handle_less.float(), step(wrapped).float()) <= 0.02


def test_auto_fuses_nothing_that_has_adapters() -> None:
    wrapped = adapted(models.deepseek_v3(**models.BOTH_FUSED), config(["q_b_proj"]))
    with mla_convert.patched(wrapped) as handle:
        assert (handle.describe().qk_form, handle.describe().vo_form) == ("factored", "factored")
        assert "LoRA" not in str(handle.describe())  # kv_b_proj itself is plain
    with mla_convert.patched(adapted(models.deepseek_v3()), form="fused") as handle:
        assert "the model itself, through LoRA adapters of PEFT" in str(handle.describe())


def test_hooks_on_a_projection_run(caplog: pytest.LogCaptureFixture) -> None:
    """A hook may change what a projection gives; the absorbed step, which does not call it, is not taken then."""
    model = models.deepseek_v3()
    attention = model.model.layers[1].self_attn
    before = step(model)
    with mla_convert.patched(model):
        hook = attention.kv_b_proj.register_forward_hook(lambda module, args, out: 0.5 * out)
        found = step(model)
        assert "model.layers.1.self_attn: kv_b_proj has hooks" in caplog.text
        hook.remove()
        assert models.relative(step(model), before) <= BOUND
    with contextlib.closing(_Hook(attention.kv_b_proj)):
        assert models.relative(found, step(model)) <= BOUND < models.relative(found, before)


class _Hook:
    def __init__(self, module: torch.nn.Module) -> None:
        self.close = module.register_forward_hook(lambda module, args, out: 0.5 * out).remove


def test_a_projection_with_a_forward_of_its_own_is_refused() -> None:
    model = models.deepseek_v3()
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.forward = lambda x: 0 * x @ projection.weight.T
    with pytest.raises(PatchError, match="kv_b_proj has a forward of its own"):
        mla_convert.patch(model)
    del projection.forward
    mla_convert.patch(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_another_dtype(dtype: torch.dtype) -> None:
    """PEFT keeps adapters of 16-bit models in float32; the sum is rounded once, as the original's outputs are."""
    plain = adapted(models.deepseek_v3(dtype=dtype, first_k_dense_replace=2))
    expected = step(plain).float()
    exact = copy.deepcopy(plain).float()
    mla_convert.patch(plain)
    # Both round differently; each may be as far from float32 as the original, doubled for luck in small models.
    own = models.relative(expected, step(exact))
    assert models.relative(step(plain).float(), step(exact)) <= 2 * own + torch.finfo(dtype).eps
