"""``StaticCache``: the decode step under ``torch.compile``, and work that follows what is stored, not the capacity."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import family_models
import models
import pytest
import torch
import torch._dynamo.testing
from generation import check_patched, generated, small
from patching import BOUND, expanded_widths, layers, steps
from transformers import CompileConfig, PreTrainedModel, StaticCache

import mla_convert
from mla_convert.kernels import torch_decode

FORMS = [{}, pytest.param({"form": "fused"}, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilations of other tests are forgotten; pytest does not collect the compiler's trace, which takes minutes."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decode(model: PreTrainedModel, step: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, vocabulary]: eight tokens at once by the model, then one by one through ``step``."""
    cache = StaticCache(config=model.config, max_cache_len=mask.shape[1])
    outs = [model(ids[:, :8], attention_mask=mask[:, :8], cache=cache).logits]
    for i in range(8, ids.shape[1]):
        position = (mask[:, :i].sum(-1, keepdim=True)).clamp(min=0)
        outs.append(step(ids[:, i : i + 1], attention_mask=mask, position_ids=position, cache=cache).logits)
    return torch.cat(outs, dim=1)


def padding(batch: int, capacity: int) -> torch.Tensor:
    mask = torch.ones(batch, capacity, dtype=torch.long)
    mask[0, :3] = 0
    return mask


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.no_grad()
def test_the_compiled_step_is_one_graph_for_all_tokens(form: dict[str, str]) -> None:
    """No break (``fullgraph``), one compilation for 16 tokens, and our operator inside it once for each layer."""
    model, ids, mask = models.deepseek_v3(), models.tokens(2, 24), padding(2, 40)
    expected = decode(model, model, ids, mask)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with mla_convert.patched(model, **form):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = decode(model, compiled, ids, mask)
    real = mask[:, :24].bool()
    assert models.relative(found[real], expected[real]) <= BOUND
    assert counter.frame_count == 1
    ours = [n for n in counter.graphs[0].graph.nodes if n.target is torch.ops.mla_convert.absorbed_decode.default]
    assert len(ours) == 2


def test_generate_that_compiles_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``generate()`` does on accelerators by itself with a static cache."""
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": 5}
    subject = small()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_patched(subject.model, lambda m: _forgetting(m, subject.padded, attention_mask=subject.mask, **options))


def _forgetting(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
    """``generated`` without the compiled step that transformers keeps on the model."""
    torch._dynamo.reset()
    outcome = generated(model, *args, **options)
    assert "_compiled_call" in vars(model)
    del model._compiled_call, model._last_compile_config
    return outcome


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # in PyTorch's own code
@torch.no_grad()
def test_the_step_compiles_with_inductor() -> None:
    """PyTorch's own compiler: C++ on a CPU."""
    model, ids, mask = models.deepseek_v3(), models.tokens(2, 16), padding(2, 40)
    expected = decode(model, model, ids, mask)
    with mla_convert.patched(model):
        found = decode(model, torch.compile(model, fullgraph=True), ids, mask)
    real = mask[:, :16].bool()
    assert models.relative(found[real], expected[real]) <= BOUND


#: Without experts, over which models loop: each turn would be a graph of its own, slow to make and nothing of ours.
DENSE: dict[str, Any] = {"first_k_dense_replace": 9}
MORE_DENSE: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"mlp_layer_types": ["dense"] * 2},
    "hy_v4": {"mlp_layer_types": ["dense"] * 2},
    "hy_v4_vl": {"mlp_layer_types": ["dense"] * 2},
}


def compiled_run(model: PreTrainedModel) -> tuple[torch.Tensor, tuple[int, int], int]:
    """Logits of two compiled steps; graphs and breaks between them; our operators in the graphs of one step."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    step: Any = torch.compile(model, backend=counter)
    cache, ids = StaticCache(config=model.config, max_cache_len=24), models.tokens(1, 11)
    outs = [model(ids[:, :9], cache=cache, use_cache=True).logits]
    for i in range(9, 11):
        new = {"cache": cache, "use_cache": True, "position_ids": torch.tensor([[i]])}
        outs.append(step(ids[:, i : i + 1], **new).logits)
    nodes = [node.target for graph in counter.graphs for node in graph.graph.nodes]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.utils.counters.clear()
    found = torch.cat(outs, dim=1), (counter.frame_count, breaks)
    return *found, nodes.count(torch.ops.mla_convert.absorbed_decode.default)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
@torch.no_grad()
def test_every_family_s_step_compiles_as_it_did(model_type: str) -> None:
    """As many graphs and breaks (other parts of a model may have some) as unpatched, with our operator in them."""
    model = family_models.make(model_type, **DENSE | MORE_DENSE.get(model_type, {}))
    expected, graphs, none = compiled_run(model)
    with mla_convert.patched(model):
        found, ours, operators = compiled_run(model)
        count = len(layers(model))
    assert models.relative(found, expected) <= BOUND
    assert (ours, none) == (graphs, 0) and operators >= count


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cached tokens that each call of the CPU's attention reads."""
    seen: list[int] = []
    attend = torch_decode.attend

    def noting(q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, *args: Any) -> Any:
        seen.append(latent.shape[1])
        return attend(q_latent, q_rope, latent, *args)

    monkeypatch.setattr(torch_decode, "attend", noting)
    return seen


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_work_follows_the_tokens_used(compiled: bool, reads: list[int]) -> None:
    """100 tokens used: as many are read at a capacity of 32,768 as at one of 128, and no NaN past them matters."""
    model, ids = models.deepseek_v3(num_hidden_layers=1), models.tokens(1, 104)
    expected = model(ids).logits[:, 100:]
    read = {}
    with mla_convert.patched(model):
        step: Any = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        for capacity in (128, 32768):
            cache = StaticCache(config=model.config, max_cache_len=capacity)
            model(ids[:, :100], cache=cache)
            for layer in cache.layers:
                layer.keys[:, :, 104:] = torch.nan
                layer.values[:, :, 104:] = torch.nan
            reads.clear()
            outs = [step(ids[:, i : i + 1], cache=cache, position_ids=torch.tensor([[i]])) for i in range(100, 104)]
            assert models.relative(torch.cat([out.logits for out in outs], 1), expected) <= BOUND
            read[capacity] = list(reads)
    assert read[128] == read[32768] == [101, 102, 103, 104]


#: Sparse attention, where the installed transformers has it for us.
SPARSE = next(name for name in ("deepseek_v32", "deepseek_v2") if name in family_models.AVAILABLE)


def published(model_type: str) -> dict[str, int]:
    """Of an indexer's config, as many tokens as published models choose: more than are stored."""
    return {"index_topk": 2048} if "index_topk" in str(family_models.MODELS[model_type][1]) else {}


@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
@torch.no_grad()
def test_every_family_s_work_follows_the_tokens_used(model_type: str, reads: list[int]) -> None:
    """Also where an indexer chooses more tokens than there are; a layer with a window reads that."""
    model, ids = family_models.make(model_type, **published(model_type)), models.tokens(1, 102)
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    expected = model(ids, use_cache=False).logits[:, 100:]
    read = {}
    with mla_convert.patched(model):
        for capacity in (128, 32768):
            cache = StaticCache(config=model.config, max_cache_len=capacity)
            outs = family_steps(model, model, ids, cache, reads)
            assert models.relative(torch.cat(outs, 1), expected) <= BOUND
            read[capacity] = list(reads)
        count = len(layers(model))
    assert read[128] == read[32768] and len(read[128]) == 2 * count
    assert set(read[128]) - {window} == {101, 102}


@torch.no_grad()
def test_compiled_sparse_work_follows_the_tokens_used(reads: list[int]) -> None:
    model, ids = family_models.make(SPARSE, **published(SPARSE) | DENSE), models.tokens(1, 102)
    expected = model(ids, use_cache=False).logits[:, 100:]
    with mla_convert.patched(model):
        step: Any = torch.compile(model, backend="eager", fullgraph=True)
        cache = StaticCache(config=model.config, max_cache_len=4096)
        outs = family_steps(model, step, ids, cache, reads)
    assert models.relative(torch.cat(outs, 1), expected) <= BOUND
    assert reads == [101, 101, 102, 102]


def family_steps(
    model: PreTrainedModel, step: Callable[..., Any], ids: torch.Tensor, cache: StaticCache, reads: list[int]
) -> list[torch.Tensor]:
    """Logits of two steps after 100 tokens; ``reads`` are of the steps alone."""
    model(ids[:, :100], cache=cache, use_cache=True)
    reads.clear()
    options = {"cache": cache, "use_cache": True}
    return [
        step(ids[:, i : i + 1], position_ids=torch.tensor([[i]]), **options).logits for i in range(100, ids.shape[1])
    ]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@torch.no_grad()
def test_prefill_expands_what_is_stored(padded: bool, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the capacity, which transformers expands; in chunks too."""
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 20)
    masked = {"attention_mask": padding(2, 20)} if padded else {}
    expected = steps(model, ids, StaticCache(config=model.config, max_cache_len=500), [12, 8], **masked)
    with mla_convert.patched(model, prefill_threshold=0):
        widths = expanded_widths(type(model.model.layers[0].self_attn), monkeypatch)
        found = steps(model, ids, StaticCache(config=model.config, max_cache_len=500), [12, 8], **masked)
    real = padding(2, 20).bool() if padded else torch.ones(2, 20, dtype=torch.bool)
    assert models.relative(found[real], expected[real]) <= BOUND
    assert widths == [12, 12, 20, 20]
