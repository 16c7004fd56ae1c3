"""One decode step of one attention module: transformers beside the absorbed form, in one run.

    python benchmarks/decode_step.py [--json FILE]

Without options it measures what the README quotes (:data:`QUOTED`), in a few minutes on two cores. ``--dims``,
``--dtype`` and ``--history`` choose other dimensions, dtypes and lengths, each with each.

Projections, rotation, cache append, attention and output projection are timed together. The two sides
take turns; medians of their repetitions and the ratio are printed, with the spread (quartiles) so that a
disturbed run shows. Both sides see the same random latents and the same weights.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pathlib
import statistics
import time
from typing import Any

import recording
import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

import mla_convert
from mla_convert.machine import device_name

#: Dimensions, dtype and histories of what is measured by default.
QUOTED = [
    ("v2-lite", "bfloat16", [64, 1024, 4096, 16384]),
    ("v2-lite", "float32", [64, 1024, 4096, 16384]),
    ("v3", "bfloat16", [4096]),
]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
}
HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DIMS: dict[str, Any] = {
    "small": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SMALL,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=64,
        )
    ),
    "v2-lite": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **SMALL, **HEADS, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None
        )
    ),
    "v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SMALL, **HEADS, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536
        )
    ),
}


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """``cache`` by the name that a model or its attention has for it: ``past_key_values`` before transformers 5.24."""
    return {"cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values": cache}


class Side:
    """One way to take the step: a model and a cache that holds the history."""

    def __init__(self, model: Any, history: int, seed: int, cache: Any = None) -> None:
        device = model.device
        self.module = model.model.layers[0].self_attn
        kind = mla_convert.LatentCache if hasattr(model, "_mla_patch") else DynamicCache
        self.cache = kind() if cache is None else cache
        gen = torch.Generator().manual_seed(seed)
        config, dtype = model.config, model.dtype
        latent = torch.randn(1, 1, history, config.kv_lora_rank, generator=gen).to(device, dtype)
        k_rope = torch.randn(1, 1, history, config.qk_rope_head_dim, generator=gen).to(device, dtype)
        self.cache.update(latent, k_rope, 0)
        self.history = history
        self.hidden = torch.randn(1, 1, config.hidden_size, generator=gen).to(device, dtype)
        position = torch.full((1, 1), history, device=device)
        self.given: dict[str, Any] = {"hidden_states": self.hidden, "attention_mask": None}
        self.given["position_embeddings"] = model.model.rotary_emb(self.hidden, position)
        self.given |= with_cache(self.module, self.cache)

    def step(self) -> torch.Tensor:
        """One new token; its latent is appended."""
        out: tuple[torch.Tensor, ...] = self.module(**self.given)
        return out[0]

    def back(self) -> None:
        """Forget the token again, which must be there: a step that passed its cache over is none."""
        length = self.cache.get_seq_length()
        assert length == self.history + 1, f"a step over {self.history} tokens left {length} in the cache"
        for layer in self.cache.layers:
            layer.crop(-1)


def measure(sides: dict[str, Side], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each side's steps, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions + 2):
        for name, side in sides.items():
            start = time.perf_counter()
            side.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            side.back()
            if repetition >= 2:
                times[name].append(elapsed)
    return times


def pair(dims: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """The original model and a patched one with the same random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        original, patched = (DIMS[dims]().to(dtype).eval() for _ in range(2))
    patched.load_state_dict(original.state_dict())
    mla_convert.patch(patched)
    return original, patched


@torch.inference_mode()
def on_device(dims: str, dtype: torch.dtype, history: int, device: str) -> dict[str, float]:
    """Median seconds of both sides on a device, and their ratio."""
    original, patched = pair(dims, dtype, device)
    sides = {"transformers": Side(original, history, 1), "absorbed": Side(patched, history, 1)}
    medians = {name: statistics.median(values) for name, values in measure(sides, 11).items()}
    return medians | {"ratio": medians["transformers"] / medians["absorbed"]}


@torch.inference_mode()
def compare(dims: str, dtype: torch.dtype, histories: list[int], repetitions: int) -> list[dict[str, Any]]:
    """One row per history: medians in milliseconds, quartiles, ratio, and the outputs' relative difference."""
    original, patched = pair(dims, dtype)
    rows = []
    for history in histories:
        sides = {"transformers": Side(original, history, 1), "absorbed": Side(patched, history, 1)}
        a, b = (side.step() for side in sides.values())
        for side in sides.values():
            side.back()
        difference = float((a - b).abs().max() / a.abs().max())
        times = measure(sides, repetitions if history < 8192 else max(5, repetitions // 3))
        medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        quartiles = {name: [q * 1e3 for q in statistics.quantiles(v, n=4)[::2]] for name, v in times.items()}
        ratio = medians["transformers"] / medians["absorbed"]
        rows.append(
            {"dims": dims, "dtype": str(dtype).removeprefix("torch."), "history": history, "ms": medians}
            | {"quartiles_ms": quartiles, "ratio": ratio, "relative_difference": difference}
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    ms, spread = row["ms"], row["quartiles_ms"]
    cells = [f"{ms[n]:9.2f} ({spread[n][0]:.2f} to {spread[n][1]:.2f})" for n in ("transformers", "absorbed")]
    return f"{row['dims']:>8} {row['dtype']:>9} {row['history']:>7} {cells[0]:>32} {cells[1]:>28} {row['ratio']:8.1f}x"


def machine(threads: int) -> str:
    """The CPU, and what it computes bfloat16 with, which decides what these figures are."""
    info = pathlib.Path("/proc/cpuinfo")
    flags = set(info.read_text("utf-8").split()) if info.is_file() else set()
    features = [
        words for flag, words in (("avx512_bf16", "bfloat16 instructions"), ("amx_bf16", "AMX")) if flag in flags
    ]
    width = torch.backends.cpu.get_cpu_capability()
    what = ", ".join([width, *(features or ["no bfloat16 instructions"])])
    return f"{os.cpu_count()} cores of {device_name(torch.device('cpu'))} ({what}), {threads} threads"


def chosen(args: argparse.Namespace) -> list[tuple[str, str, list[int]]]:
    """What the options ask for: dimensions, dtype and histories of each run."""
    if not (args.dims or args.dtype or args.history):
        return QUOTED
    histories = args.history or [64, 1024, 4096, 16384]
    pairs = ((dims, dtype) for dims in args.dims or ["v2-lite"] for dtype in args.dtype or ["bfloat16", "float32"])
    return [(dims, dtype, histories) for dims, dtype in pairs]


def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", choices=DIMS, nargs="+")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], nargs="+")
    parser.add_argument("--history", type=int, nargs="+")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    recording.add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = {
        "machine": machine(args.threads),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    print(f"torch {head['torch']}, transformers {head['transformers']}, {head['machine']}")
    print(f"{'dims':>8} {'dtype':>9} {'history':>7} {'transformers ms':>32} {'absorbed ms':>28} {'ratio':>9}")
    rows = []
    for dims, dtype, histories in chosen(args):
        rows += compare(dims, getattr(torch, dtype), histories, args.repetitions)
    recording.write(parser, args, head | {"rows": rows})


if __name__ == "__main__":
    main()
