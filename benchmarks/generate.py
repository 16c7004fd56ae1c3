"""A whole model beside transformers: decode steps, a long prefill, memory of a step, the capacity of a StaticCache.

    python benchmarks/generate.py [--only steps prefill memory static] [--repetitions N] [--json FILE]

The model has the attention of DeepSeek-V2-Lite (16 heads, C 512, N 128, R 64, V 128, hidden 2048) in 4 layers, random
weights in bfloat16, and a small MLP and vocabulary: the figures are those of attention and of what patching adds to it.
Both sides take turns in one run, and share their weights; medians, and the median of the ratios of neighbours.
Memory is what PyTorch's profiler sees allocated at most at once during a step, beyond what was there before it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import recording
import torch
from decode_step import with_cache
from torch.profiler import ProfilerActivity, profile
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache, StaticCache

import mla_convert
from mla_convert.benchmark import twin

LAYERS, LONG, USED = 4, 32768, 100
#: Ratios that the design asks for.
TARGETS = {"step 64": 1.5, "step 1024": 8, "step 4096": 31, "step 16384": 65, "prefill 4096": 1.4}
LIMITS = {"memory 32768": 0.02, "static 32768 / 128": 1.5}

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def build(layers: int) -> tuple[Any, Any]:
    """The original model and a patched one over the same weights."""
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=None,
        max_position_embeddings=163840,
    )
    torch.manual_seed(0)
    original = DeepseekV2ForCausalLM(config).to(torch.bfloat16).eval()
    patched = twin(original)
    mla_convert.patch(patched)
    return original, patched


def history(model: Any, tokens: int) -> Any:
    """The cache that ``generate()`` would use, filled with random latents."""
    cache = mla_convert.LatentCache() if hasattr(model, "_mla_patch") else DynamicCache()
    generator = torch.Generator().manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        latent, rope = (torch.randn(1, 1, tokens, w, generator=generator, dtype=model.dtype) for w in (512, 64))
        cache.update(latent, rope, layer)
    return cache


def stepping(model: Any, cache: Any) -> Callable[[], Any]:
    """One new token over ``cache``, taken back afterwards."""
    token, given = torch.zeros(1, 1, dtype=torch.long), with_cache(model, cache)
    tokens = int(cache.get_seq_length())  # a StaticCache gives the tensor that it counts in

    def step() -> None:
        model(token, **given)
        assert int(cache.get_seq_length()) == tokens + 1
        for layer in cache.layers:
            layer.crop(-1)

    return step


def in_turns(pair: Pair, repetitions: int) -> dict[str, float]:
    """Median milliseconds of both, and the median ratio of neighbours; two rounds go before."""
    times: list[tuple[float, float]] = []
    for _ in range(repetitions + 2):
        times.append((_seconds(pair[0]), _seconds(pair[1])))
    first, second = zip(*times[2:], strict=True)
    return {
        "first_ms": statistics.median(first) * 1e3,
        "second_ms": statistics.median(second) * 1e3,
        "ratio": statistics.median(a / b for a, b in times[2:]),
    }


def _seconds(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def steps(repetitions: int) -> dict[str, Any]:
    """Decode steps: transformers first, patched second."""
    original, patched = build(LAYERS)
    found = {}
    for tokens in (64, 1024, 4096, 16384):
        pair = (stepping(original, history(original, tokens)), stepping(patched, history(patched, tokens)))
        found[f"step {tokens}"] = in_turns(pair, repetitions if tokens < 8192 else max(3, repetitions // 4))
    return found


def prefill(repetitions: int) -> dict[str, Any]:
    """4,096 tokens at once, in two layers: transformers first, patched second."""
    original, patched = build(2)
    ids = torch.randint(0, 1024, (1, 4096))
    pair = tuple(lambda m=m: m(ids, **with_cache(m, DynamicCache()), logits_to_keep=1) for m in (original, patched))
    return {"prefill 4096": in_turns(pair, max(3, repetitions // 4))}  # type: ignore[arg-type]


def memory(_: int) -> dict[str, Any]:
    """Peak bytes of a step over 32,768 tokens in one layer."""
    peaks = [_peak(stepping(model, history(model, LONG))) for model in build(1)]
    return {"memory 32768": {"first_bytes": peaks[0], "second_bytes": peaks[1], "ratio": peaks[1] / peaks[0]}}


def _peak(run: Callable[[], Any]) -> int:
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events: Any = profiled.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def static(repetitions: int) -> dict[str, Any]:
    """A step with 100 tokens stored, at capacities 32,768 (first) and 128 (second), of both models."""
    found = {}
    for name, model in zip(("transformers", "static"), build(LAYERS), strict=True):
        rounds = max(3, repetitions // 4) if name == "transformers" else repetitions
        pair = tuple(_static_step(model, capacity) for capacity in (LONG, 128))
        found["static 32768 / 128" if name == "static" else "transformers' own, 32768 / 128"] = in_turns(pair, rounds)  # type: ignore[arg-type]
    return found


def _static_step(model: Any, capacity: int) -> Callable[[], Any]:
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    cache_of: Any = cache
    latent, rope = (torch.randn(1, 1, USED, width, dtype=model.dtype) for width in (512, 64))
    for layer in range(model.config.num_hidden_layers):
        cache_of.update(latent, rope, layer)
    return stepping(model, cache)


SECTIONS = {"steps": steps, "prefill": prefill, "memory": memory, "static": static}


def line(name: str, row: dict[str, float]) -> str:
    """A row for people, with what the design asks for."""
    unit = "ms" if "first_ms" in row else "bytes"
    goal = f"at least {TARGETS[name]}" if name in TARGETS else f"at most {LIMITS[name]}" if name in LIMITS else ""
    return (
        f"{name:32} {row[f'first_{unit}']:14,.1f} {row[f'second_{unit}']:14,.1f} {unit:5} {row['ratio']:9.3f}  {goal}"
    )


def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    recording.add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    machine = f"{args.threads} threads, {capability}"
    print(f"torch {torch.__version__}, {machine}")
    rows: dict[str, Any] = {}
    for section in args.only:
        with torch.inference_mode():
            found = SECTIONS[section](args.repetitions)
        for name, row in found.items():
            print(line(name, row), flush=True)
        rows |= found
    recording.write(parser, args, {"torch": torch.__version__, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
