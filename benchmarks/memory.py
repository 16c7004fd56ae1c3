"""What a patched model weighs in memory: resident bytes of a process each, with absorbed weights in fewer bits.

    python benchmarks/memory.py [--layers 12] [--dtype bfloat16] [--json FILE]

A model of DeepSeek-V2-Lite's attention (16 heads, D 2048, C 512, R 64, N = V = 128) with random weights and next to
nothing besides, saved and converted in a temporary folder. Each row is a process of its own that loads it, patches it
as the row says ("kept" is ``codes="keep"``), decodes a few tokens, and reads its resident set (VmRSS of
/proc/self/status, so Linux alone); what it takes beyond the unpatched model stands beside the bytes of absorbed weights
that it holds. ``kv_b_proj`` itself stays, for prefill, in every row. Two minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import recording
import torch
from decode_step import HEADS, SMALL, with_cache
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache

import mla_convert
from mla_convert.machine import describe_machine
from mla_convert.patches.layer import layer_of
from mla_convert.patches.loading import load_original
from mla_convert.quiet import no_loading_bars

KEEP = {"codes": "keep"}
#: Name of a row -> form, options of convert and of patch; None is the unpatched model.
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]] | None] = {
    "unpatched": None,
    "patched": ("factored", {}, {}),
    "int8": ("factored", {"quantize": "int8"}, {}),
    "fp8 128x128": ("factored", {"quantize": "fp8"}, {}),
    "int4 g32": ("factored", {"quantize": "int4"}, {}),
    "int8, kept": ("factored", {"quantize": "int8"}, KEEP),
    "fp8 128x128, kept": ("factored", {"quantize": "fp8"}, KEEP),
    "int4 g32, kept": ("factored", {"quantize": "int4"}, KEEP),
    "fused": ("fused", {}, {}),
    "fused int8": ("fused", {"quantize": "int8"}, {}),
}


def write_model(folder: pathlib.Path, layers: int, dtype: torch.dtype) -> None:
    """A checkpoint of ``layers`` such layers."""
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    heads = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
    DeepseekV2ForCausalLM(DeepseekV2Config(**sizes, **HEADS, **heads)).to(dtype).save_pretrained(folder)


@torch.inference_mode()
def measure_here(name: str, folder: str, absorbed: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """In a process of its own: load, patch unless ``absorbed`` is None, decode, and read the resident set."""
    row = ROWS[name]
    with no_loading_bars():
        model = load_original(folder, dtype=dtype)
    products: list[str] = []
    if row is not None:
        products = list(mla_convert.patch(model, absorbed, form=row[0], **row[2]).describe().products)
    cache, ids = DynamicCache(config=model.config), torch.arange(16)[None]
    for at in (slice(0, 12), slice(12, 13), slice(13, 14)):
        model(ids[:, at], **with_cache(model, cache))
    assert cache.get_seq_length() == 14
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    status = {
        name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    layers = [layer for module in model.modules() if (layer := layer_of(module)) is not None]
    held = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    return {"resident_bytes": status["VmRSS"], "absorbed_bytes": held, "products": products}


def in_a_process(name: str, folder: pathlib.Path, absorbed: pathlib.Path | None, dtype: str) -> dict[str, Any]:
    """:func:`measure_here` in a new process."""
    command = [sys.executable, __file__, "--dtype", dtype, "--row", name, "--folder", str(folder)]
    command += [] if absorbed is None else ["--absorbed", str(absorbed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    recording.add_json(parser)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--absorbed", help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.folder:
        print(json.dumps(measure_here(args.row, args.folder, args.absorbed, dtype)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "model"
        write_model(folder, args.layers, dtype)
        folders: dict[str, tuple[pathlib.Path, int]] = {}
        for name, how in ROWS.items():
            absorbed, stored = None, 0
            if how is not None:
                form, options, _ = how
                key = f"{form}-{options.get('quantize')}"
                if key not in folders:
                    out = pathlib.Path(temporary) / key
                    folders[key] = out, mla_convert.convert(folder, out, form=form, **options).bytes_out
                absorbed, stored = folders[key]
            row = {"name": name, "stored_bytes": stored} | in_a_process(name, folder, absorbed, args.dtype)
            row["beyond_unpatched"] = row["resident_bytes"] - (
                rows[0]["resident_bytes"] if rows else row["resident_bytes"]
            )
            rows.append(row)
            print(
                f"{name:<22} resident {row['resident_bytes'] / 1e6:8.1f} MB, beyond unpatched "
                f"{row['beyond_unpatched'] / 1e6:7.1f} MB, absorbed weights {row['absorbed_bytes'] / 1e6:6.1f} MB in "
                f"memory, {stored / 1e6:6.1f} MB on disk; {'; '.join(row['products'])}",
                flush=True,
            )
    machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
    result = {"machine": machine, "layers": args.layers, "dtype": args.dtype, "rows": rows}
    recording.write(parser, args, result)


if __name__ == "__main__":
    main()
