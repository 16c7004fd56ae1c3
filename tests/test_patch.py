"""Patched models do what the originals do: prefill, decode, padding, every cache, every form, and back again."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import mla_convert
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.kernels import dispatch
from mla_convert.patches.attention import HARMLESS
from mla_convert.patches.layer import AbsorbedLayer, layer_of

#: Largest logit difference over the range in float32, from the design.
BOUND = 1e-4
FORMS = [{}, {"form": "fused"}, {"qk": "fused", "vo": "factored"}, {"qk": "factored", "vo": "fused"}]


def layers(model: PreTrainedModel) -> list[AbsorbedLayer]:
    return [layer for module in model.modules() if (layer := layer_of(module))]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of new tokens of each absorbed call, in order."""
    seen: list[int] = []
    attend = AbsorbedLayer.attend

    def counting(self: AbsorbedLayer, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return attend(self, query, *args, **kwargs)

    monkeypatch.setattr(AbsorbedLayer, "attend", counting)
    return seen


def steps(model: PreTrainedModel, ids: torch.Tensor, cache: Any, sizes: list[int], **kwargs: Any) -> torch.Tensor:
    """Logits [B, S, vocabulary] of ``ids`` fed in pieces of ``sizes``."""
    outs, at = [], 0
    for size in sizes:
        more = {k: v[:, : at + size] if k == "attention_mask" else v for k, v in kwargs.items()}
        outs.append(model(ids[:, at : at + size], cache=cache, use_cache=True, **more).logits)
        at += size
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("make", [models.deepseek_v3, models.deepseek_v2])
@torch.inference_mode()
def test_decode_equals_the_original(
    make: Callable[..., PreTrainedModel], form: dict[str, str], attn: str, runs: list[int]
) -> None:
    model, ids = make(attn=attn), models.tokens(2, 30)
    whole = model(ids).logits
    for sizes in ([20] + [1] * 10, [9, 3, 3, 1, 14], [1] * 30):
        with mla_convert.patched(model, **form):
            runs.clear()
            logits = steps(model, ids, DynamicCache(), sizes)
        assert models.relative(logits, whole) <= BOUND
        assert runs.count(1) == 2 * sizes.count(1)  # two layers
    with mla_convert.patched(model, prefill_threshold=30, **form):
        runs.clear()
        assert models.relative(model(ids).logits, whole) <= BOUND
        assert runs == [30, 30]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "make_cache",
    [
        lambda config: DynamicCache(config=config),
        lambda config: DynamicCache(),
        lambda config: mla_convert.LatentCache(config),
        lambda config: mla_convert.LatentCache(),
        lambda config: StaticCache(config=config, max_cache_len=40),
    ],
    ids=["dynamic", "dynamic-lazy", "latent", "latent-lazy", "static"],
)
@torch.inference_mode()
def test_left_padding_with_every_cache(make_cache: Callable[[Any], Any], attn: str) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(3, 24)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :1] = 0, 0
    for sizes in ([12] + [1] * 12, [12, 3, 3, 3, 3]):
        expected = steps(model, ids, make_cache(model.config), sizes, attention_mask=mask)
        for form in ({}, {"form": "fused"}, {"cache": "dynamic"}, {"prefill_threshold": 12}):
            with mla_convert.patched(model, **form):
                found = steps(model, ids, make_cache(model.config), sizes, attention_mask=mask)
            real = mask.bool()
            assert models.relative(found[real], expected[real]) <= BOUND


@torch.inference_mode()
def test_right_padding_and_custom_masks() -> None:
    """Patterns that are not causal with a padded front: the causal rule must not hide what the mask shows."""
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    padded = torch.ones_like(ids)
    padded[0, 9:] = 0
    open_prefix = torch.ones(12, 12, dtype=torch.bool).tril()
    open_prefix[:4, :4] = True
    boolean = open_prefix.expand(2, 1, 12, 12)
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~boolean, torch.finfo(torch.float32).min)
    biased = additive - 0.3 * torch.rand(12, generator=torch.Generator().manual_seed(0))
    for mask in (padded, boolean, additive, biased):
        expected = model(ids, attention_mask=mask).logits
        with mla_convert.patched(model, prefill_threshold=12):
            found = model(ids, attention_mask=mask).logits
        real = padded.bool() if mask is padded else torch.ones_like(padded, dtype=torch.bool)
        assert models.relative(found[real], expected[real]) <= BOUND


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("threshold", [0, 12])
@torch.inference_mode()
def test_first_prefill_into_a_static_cache(attn: str, threshold: int) -> None:
    """Without a mask, the first S keys count, and the empty rest of the cache does not."""
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 12)
    expected = model(ids).logits
    with mla_convert.patched(model, prefill_threshold=threshold):
        found = model(ids, cache=StaticCache(config=model.config, max_cache_len=30)).logits
    assert models.relative(found, expected) <= BOUND


@torch.inference_mode()
def test_static_cache_stops_at_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told where the history ends, so that the rest of the capacity is not read."""
    model, ids = models.deepseek_v3(), models.tokens(2, 9)
    lengths = []

    def noting(args: Any, backend: str) -> Any:
        lengths.append(args.kv_lens.tolist())
        return dispatch.decode(args, backend)

    monkeypatch.setattr("mla_convert.patches.layer.decode", noting)
    with mla_convert.patched(model):
        cache = StaticCache(config=model.config, max_cache_len=64)
        for i in range(9):
            model(ids[:, i : i + 1], cache=cache)
    assert lengths == [[i, i] for i in range(1, 10) for _ in range(2)]


@pytest.mark.parametrize(
    ("dims", "forms"),
    [
        (models.KEY_FUSED, ("fused", "factored")),
        (models.VALUE_FUSED, ("factored", "fused")),
        (models.BOTH_FUSED, ("fused", "fused")),
        ({}, ("factored", "factored")),
        ({"qk_rope_head_dim": 4, "num_attention_heads": 1, "num_key_value_heads": 1}, ("factored", "factored")),
        ({"kv_lora_rank": 12, "v_head_dim": 12, "qk_nope_head_dim": 12, "hidden_size": 48}, None),
    ],
    ids=["key", "value", "both", "neither", "one-head", "c-equals-v"],
)
@torch.inference_mode()
def test_auto_picks_the_form_that_reads_fewer(dims: dict[str, int], forms: tuple[str, str] | None) -> None:
    model, ids = models.deepseek_v3(**dims), models.tokens(2, 16)
    expected = model(ids).logits
    for asked in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **asked) as handle:
            described = handle.describe()
            if forms and not asked:
                assert (described.qk_form, described.vo_form) == forms
            found = steps(model, ids, DynamicCache(), [6, 1, 2, 1, 1, 5])
        assert models.relative(found, expected) <= BOUND


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_biased_projections(bias: bool, form: dict[str, str]) -> None:
    model, ids = models.deepseek_v3(attention_bias=bias), models.tokens(2, 10)
    if bias:
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.normal_()
    expected = model(ids).logits
    with mla_convert.patched(model, **form):
        found = steps(model, ids, DynamicCache(), [4] + [1] * 6)
    assert models.relative(found, expected) <= BOUND


@torch.inference_mode()
def test_generate_gives_the_same_tokens(example_path: Any) -> None:
    """The trained example, a batch of 4 with left padding, 200 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(example_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.float32).eval()
    texts = [
        "def",
        "import os\n\nclass Reader:\n    def __init__(self",
        "    for name in names:\n",
        "# A comment\nx = [",
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    expected = model.generate(**batch, **options)
    for form in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **form):
            assert torch.equal(model.generate(**batch, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_is_as_close_as_the_original(dtype: torch.dtype) -> None:
    """Distance to the float32 model, in the mean: at most 1.25 times the original's own."""
    exact, ids = models.deepseek_v3(), models.tokens(8, 64)
    reference = exact(ids).logits
    model = models.deepseek_v3(dtype=dtype)
    own = (steps(model, ids, DynamicCache(), [32] + [1] * 32).float() - reference).abs().mean()
    for form in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **form):
            found = (steps(model, ids, DynamicCache(), [32] + [1] * 32).float() - reference).abs().mean()
        assert found <= 1.25 * own


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that patching could leave behind."""
    parts: dict[str, Any] = {"config": dict(vars(model.config)), "keys": sorted(vars(model))}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ("config", "training")}
        tables = {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)}
        parts[name] = (own, {k: list(v) for k, v in tables.items()})
    return parts


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.inference_mode()
def test_unpatch_gives_the_model_back(form: dict[str, str], attn: str) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 10)
    before, logits, state = snapshot(model), model(ids).logits, model.state_dict()
    handle = mla_convert.patch(model, **form)
    steps(model, ids, DynamicCache(), [5, 1, 1, 3])
    assert list(model.state_dict()) == list(state)
    handle.unpatch()
    assert snapshot(model) == before
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_an_exception_restores_and_leaves_no_call_behind() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 4)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="stop"), mla_convert.patched(model, form="fused"):
        layer = layers(model)[0]
        model.model.layers[0].self_attn.kv_a_proj_with_mqa.register_forward_hook(_stop)
        try:
            with torch.inference_mode():
                model(ids[:, :1])
        finally:
            assert layer.slot.get() is None
            model.model.layers[0].self_attn.kv_a_proj_with_mqa._forward_hooks.clear()
    assert snapshot(model) == before


def _stop(*_: Any) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize("form", [{}, {"form": "fused"}], ids=str)
@torch.inference_mode()
def test_copies_and_pickles_are_patched_and_independent(form: dict[str, str]) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 10)
    expected = model(ids).logits
    mla_convert.patch(model, **form)
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(buffer.getvalue())):
        assert models.relative(steps(other, ids, DynamicCache(), [6, 1, 1, 1, 1]), expected) <= BOUND
        for source in (s for layer in layers(other) for s in layer.sources):
            assert not any(source.linear is module for module in model.modules())
            assert any(source.linear is module for module in other.modules())
        mla_convert.unpatch(other)
        assert torch.equal(other(ids).logits, expected)
    assert len(layers(model)) == 2
    assert models.relative(steps(model, ids, DynamicCache(), [6, 1, 1, 1, 1]), expected) <= BOUND


@torch.inference_mode()
def test_a_pickle_registers_what_it_needs() -> None:
    """The process that loads it may never have seen the original attention that lies under the patch."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    registries = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [set(registry) for registry in registries]
    AttentionInterface.register("house_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("house_attention", sdpa_mask)
    try:
        model, ids = models.deepseek_v3(), models.tokens(2, 8)
        model.set_attn_implementation("house_attention")
        expected = model(ids).logits
        mla_convert.patch(model)
        stored = pickle.dumps(model)
        for registry in registries:
            del registry[model.config._attn_implementation]
        other = pickle.loads(stored)
        assert models.relative(steps(other, ids, DynamicCache(), [4, 1, 3]), expected) <= BOUND
    finally:
        for registry, names in zip(registries, before, strict=True):
            for name in set(registry) - names:
                del registry[name]


@torch.inference_mode()
def test_a_model_that_shares_the_config_is_left_alone() -> None:
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 8)
    other = type(model)(model.config).eval()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = other(ids, attention_mask=mask).logits
    with mla_convert.patched(model):
        assert other.config._attn_implementation != "eager"
        found = other(ids, attention_mask=mask).logits
    assert models.relative(found[1], expected[1]) <= BOUND and models.relative(found[0, 3:], expected[0, 3:]) <= BOUND


def test_threads_decode_one_model_and_two() -> None:
    one, two = models.deepseek_v3(), models.deepseek_v3(seed=5)
    ids = [models.tokens(1, 40, seed=i) for i in range(4)]
    jobs = [(one, ids[0]), (one, ids[1]), (two, ids[2]), (two, ids[3])]
    with torch.inference_mode():
        expected = [model(tokens).logits for model, tokens in jobs]
    found: list[torch.Tensor | None] = [None] * 4

    def work(i: int) -> None:
        with torch.inference_mode():
            found[i] = steps(jobs[i][0], jobs[i][1], DynamicCache(), [10, 1, 1, 8] + [1] * 20)

    with mla_convert.patched(one, form="fused"), mla_convert.patched(two, form="fused"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for logits, reference in zip(found, expected, strict=True):
        assert logits is not None and models.relative(logits, reference) <= BOUND


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gradients_go_through_the_original(attn: str, runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with mla_convert.patched(model, prefill_threshold=100, form="fused"):
        model(ids, labels=ids).loss.backward()
        cache = DynamicCache()
        model(ids[:, :5], cache=cache)
        model(ids[:, 5:6], cache=cache)
    assert not runs
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_dropout_runs_expanded(runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attention_dropout=0.5), models.tokens(2, 9)
    with mla_convert.patched(model, prefill_threshold=100):
        model.train()
        model(ids)
        assert not runs
        model.eval()
        model(ids)
        assert runs == [9, 9]


@torch.inference_mode()
def test_prefill_gives_sdpa_values_as_wide_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU flash kernel wants one width; otherwise memory grows with the square of the prompt."""
    widths = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        widths.append((query.shape[-1], key.shape[-1], value.shape[-1], kwargs["attn_mask"]))
        return attention(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    model = models.deepseek_v3()
    with mla_convert.patched(model):
        model(models.tokens(2, 9))
    assert widths == [(24, 24, 24, None)] * 2


@torch.inference_mode()
def test_attention_weights_come_from_the_original(runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 9)
    expected = model(ids, output_attentions=True).attentions
    with mla_convert.patched(model, prefill_threshold=100):
        found = model(ids, output_attentions=True).attentions
        assert not runs
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.inference_mode()
def test_an_argument_that_changes_attention_is_never_ignored() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    with mla_convert.patched(model, prefill_threshold=100):
        with pytest.raises(PatchError, match="sliding_window"):
            model(ids, sliding_window=4)
        model(ids, position_ids=torch.arange(6)[None])
    assert "sliding_window" not in HARMLESS and "s_aux" not in HARMLESS and "indices" not in HARMLESS


@torch.inference_mode()
def test_packed_sequences() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 12)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    expected = model(ids, position_ids=positions, use_cache=False).logits
    for threshold in ("auto", 100):
        with mla_convert.patched(model, prefill_threshold=threshold):
            assert models.relative(model(ids, position_ids=positions, use_cache=False).logits, expected) <= BOUND


def test_cost_decides() -> None:
    """At DeepSeek-V3's dimensions 146.3 new tokens over 1,024 cached break even, 163.8 over 4,096, at most 170.7."""
    model = models.deepseek_v3(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with mla_convert.patched(model):
        layer = layers(model)[0]
        for kv_len, most in ((1024, 146), (4096, 163), (10**9, 170)):
            assert layer.prefers_absorbed(most, kv_len) and not layer.prefers_absorbed(most + 1, kv_len)
        assert layer.prefers_absorbed(1, 1)
    with mla_convert.patched(model, prefill_threshold=7):
        layer = layers(model)[0]
        assert layer.prefers_absorbed(7, 7) and not layer.prefers_absorbed(8, 4096)


def test_describe() -> None:
    model = models.deepseek_v3(attn="eager")
    with mla_convert.patched(model, vo="fused", prefill_threshold=3, cache="dynamic") as handle:
        described = handle.describe()
        handle.warmup()
    assert described.to_dict() == {
        "family": "deepseek_v3",
        "qk_form": "factored",
        "vo_form": "fused",
        "weights_from": "the model itself",
        "backend": described.backend,
        "prefill_threshold": 3,
        "cache": "dynamic",
        "original_attention": "eager",
        "layers": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    }
    assert described.backend.startswith("torch")
    for words in ("deepseek_v3", "value side fused", "eager", "up to 3 new tokens", "dynamic"):
        assert words in str(described)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "folded"}, "choose factored, fused or auto"),
        ({"qk": "both"}, "choose factored, fused or auto"),
        ({"backend": "cuda"}, "choose one of"),
        ({"prefill_threshold": -1}, "number of tokens"),
        ({"prefill_threshold": "never"}, "number of tokens"),
        ({"prefill_threshold": True}, "number of tokens"),
        ({"cache": "paged"}, "choose one of latent, dynamic"),
    ],
)
def test_refuses_options(options: dict[str, Any], words: str) -> None:
    model = models.deepseek_v3()
    before = snapshot(model)
    with pytest.raises(UsageError, match=words):
        mla_convert.patch(model, **options)
    assert snapshot(model) == before


def test_refuses_models() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = models.deepseek_v3()
    with pytest.raises(PatchError, match="not patched"):
        mla_convert.unpatch(model)
    handle = mla_convert.patch(model)
    with pytest.raises(PatchError, match="patched already"):
        mla_convert.patch(model)
    handle.unpatch()
    with pytest.raises(PatchError, match="not patched"):
        handle.describe()
    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with pytest.raises(UnsupportedModelError, match="'llama'.*deepseek_v3"):
        mla_convert.patch(LlamaForCausalLM(small))
    with pytest.raises(UsageError, match="Linear"):
        mla_convert.patch(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(PatchError, match="meta device"):
        mla_convert.patch(empty)
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises((PatchError, AttributeError), match="Sequential"):
        mla_convert.patch(model)


def test_parts_and_owners_are_patched_once() -> None:
    model = models.deepseek_v3()
    before = snapshot(model)
    for first, second in ((model, model.model), (model.model, model)):
        handle = mla_convert.patch(first)
        with pytest.raises(PatchError, match="patched already"):
            mla_convert.patch(second)
        handle.unpatch()
        assert snapshot(model) == before


@torch.inference_mode()
def test_one_config_object_carries_one_patch() -> None:
    model = models.deepseek_v3()
    other = type(model)(model.config).eval()
    with mla_convert.patched(model), pytest.raises(PatchError, match="shares its config"):
        mla_convert.patch(other)
    mla_convert.patch(other).unpatch()
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_attention_changed_under_the_patch_is_refused() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 4)
    expected = model(ids).logits
    handle = mla_convert.patch(model)
    model.set_attn_implementation("eager")
    with pytest.raises(PatchError, match="changed to 'eager'"):
        model(ids)
    handle.unpatch()
    assert torch.equal(model(ids).logits, expected)


def test_refuses_attention_without_a_mask_function() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("maskless", lambda *args, **kwargs: None)
    model = models.deepseek_v3()
    model.set_attn_implementation("maskless")
    try:
        with pytest.raises(PatchError, match="no mask function"):
            mla_convert.patch(model)
    finally:
        del AttentionInterface._global_mapping["maskless"]


@torch.inference_mode()
def test_an_unknown_family_with_the_same_seam(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 8)
    expected = model(ids).logits
    attention = type(model.model.layers[0].self_attn)
    stranger = type("StrangerAttention", (attention,), {"__module__": attention.__module__})
    for layer in model.model.layers:
        layer.self_attn.__class__ = stranger
    with pytest.raises(UnsupportedModelError, match="StrangerAttention.*allow_unknown=True"):
        mla_convert.patch(model)
    with pytest.raises(UsageError, match="cannot be fused"):
        mla_convert.patch(model, allow_unknown=True, form="fused")
    with mla_convert.patched(model, allow_unknown=True) as handle:
        assert handle.describe().family == "unknown" and "StrangerAttention" in caplog.text
        assert models.relative(steps(model, ids, DynamicCache(), [4, 1, 1, 1, 1]), expected) <= BOUND
