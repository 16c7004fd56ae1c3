"""Conversion at the sizes of DeepSeek-V3: memory, and speed beside what the machine can do.

    python benchmarks/convert.py [--layers 32] [--fused-layers 2] [--rounds 7] [--folder DIR] [--json FILE]

A checkpoint with V3's attention dimensions is made in a temporary folder: `kv_b_proj` of every layer is real, all
other tensors are holes in sparse files, 12 GB in all that take 1.1 GB of the disk. Factored conversion is timed in
turns with a plain copy of the same bytes, flushed to the disk like them; fused conversion, of a checkpoint whose
projections are all real, in turns with large float32 matrix products and with a copy of the bytes that it writes. Each
conversion is a process of its own, whose largest resident memory is compared with that of a process which only imports
the package.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import recording
import torch

from mla_convert.disk import make_file, write_at
from mla_convert.machine import describe_machine
from mla_convert.shard_plan import FileTensor, PlannedFile

H, N, R, V, C, Q, D = 128, 128, 64, 128, 512, 1536, 7168  # heads … hidden size of DeepSeek-V3
SHAPES = {
    "q_a_proj": (Q, D),
    "q_a_layernorm": (Q,),
    "q_b_proj": (H * (N + R), Q),
    "kv_a_proj_with_mqa": (C + R, D),
    "kv_a_layernorm": (C,),
    "kv_b_proj": (H * (N + V), C),
    "o_proj": (D, H * V),
}
FUSED = ("q_b_proj", "kv_b_proj", "o_proj")
#: Multiplications and additions of both fused products of one layer, and the bytes that are written of it.
FLOPS = 2 * (H * C * N * Q + D * H * V * C)
FUSED_BYTES = 2 * (H * (C + R) * Q + D * H * C)
RATES = (("matmul", "float32 matrix products' rate"), ("copy", "rate of a copy of what it writes"))

CONVERT = """
import json, resource, sys
from mla_convert.conversion import convert
options = json.loads(sys.argv[3])
report = convert(sys.argv[1], sys.argv[2], **options) if options else None
used = resource.getrusage(resource.RUSAGE_SELF)
# What getrusage calls the peak begins with that of the process which started this one.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
seconds = report.seconds if report else 0
print(json.dumps({"peak": peak, "seconds": seconds, "cpu": used.ru_utime + used.ru_stime}))
"""
COPY = """
import os, shutil, sys, time
import mla_convert.conversion
started = time.perf_counter()
shutil.copyfile(sys.argv[1], sys.argv[2])
handle = os.open(sys.argv[2], os.O_RDWR)
os.fsync(handle)
os.close(handle)
print(time.perf_counter() - started)
"""


def make_checkpoint(folder: pathlib.Path, layers: int, real: tuple[str, ...], apparent: int) -> dict[str, int]:
    """A checkpoint of ``layers`` layers whose ``real`` projections are random; its sizes in bytes.

    Experts, of zeros, make up what is left of ``apparent``.
    """
    folder.mkdir()
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": D,
        "num_attention_heads": H,
        "kv_lora_rank": C,
        "q_lora_rank": Q,
        "qk_nope_head_dim": N,
        "qk_rope_head_dim": R,
        "v_head_dim": V,
        "num_hidden_layers": layers,
        "dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for layer in range(layers):
        tensors = [
            FileTensor(f"model.layers.{layer}.self_attn.{w}.weight", s, torch.bfloat16) for w, s in SHAPES.items()
        ]
        rest = max(0, apparent // layers - sum(tensor.nbytes for tensor in tensors))
        tensors.append(FileTensor(f"model.layers.{layer}.mlp.experts", (rest // 2,), torch.bfloat16))
        file = PlannedFile(f"model-{layer + 1:05d}-of-{layers:05d}.safetensors", tensors)
        make_file(folder / file.name, file.nbytes)
        write_at(folder / file.name, 0, [file.header])
        for tensor in tensors:
            where[tensor.name] = file.name
            if tensor.name.split(".")[-2] in real:
                values = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.02)
                write_at(
                    folder / file.name, file.starts[tensor.name], [values.view(torch.uint8).numpy().reshape(-1).data]
                )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    stats = [file.stat() for file in folder.iterdir()]
    return {"apparent": sum(s.st_size for s in stats), "on_disk": sum(s.st_blocks * 512 for s in stats)}


def convert(source: pathlib.Path, out: pathlib.Path, **options: Any) -> dict[str, float]:
    """Convert in a process of its own: its largest resident memory, seconds, and seconds of the processor."""
    found: dict[str, float] = json.loads(in_process(CONVERT, str(source), str(out), json.dumps(options)))
    shutil.rmtree(out, ignore_errors=True)
    return found


def in_process(program: str, *arguments: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def copy(source: pathlib.Path, target: pathlib.Path) -> float:
    """Seconds of a plain copy, flushed to the disk.

    In a process that first imports what a conversion imports: the memory of a virtual machine that has just been freed
    is quicker than what its host has taken back in the meantime, and both should find the same.
    """
    seconds = float(in_process(COPY, str(source), str(target)))
    target.unlink()
    return seconds


def make_plain(file: pathlib.Path, nbytes: int) -> pathlib.Path:
    """A file of so many random bytes."""
    file.write_bytes(os.urandom(1 << 20) * -(-nbytes // (1 << 20)))
    os.truncate(file, nbytes)
    return file


def matmul_rate(size: int = 4096) -> float:
    """Multiplications and additions a second of a large float32 product on all cores."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    started = time.perf_counter()
    torch.mm(left, right)
    return 2 * size**3 / (time.perf_counter() - started)


def measure_factored(folder: pathlib.Path, layers: int, rounds: int) -> dict[str, Any]:
    """Memory of factored conversion of the large checkpoint, and its time beside a copy of the same bytes."""
    sizes = make_checkpoint(folder / "large", layers, ("kv_b_proj",), 12_000_000_000)
    nbytes = layers * 2 * H * (N + V) * C
    plain = make_plain(folder / "plain", nbytes)
    copies, runs = [], []
    for _ in range(rounds):
        copies.append(copy(plain, folder / "copied"))
        runs.append(convert(folder / "large", folder / "out", form="factored"))
    plain.unlink()
    shutil.rmtree(folder / "large")
    copied, taken = statistics.median(copies), statistics.median(run["seconds"] for run in runs)
    return {
        "checkpoint": sizes,
        "bytes": nbytes,
        "copy_seconds": copies,
        "runs": runs,
        "of_copy_rate": copied / taken,
        "largest_tensor": 2 * H * (N + V) * C,
    }


def measure_fused(folder: pathlib.Path, layers: int, rounds: int) -> dict[str, Any]:
    """Memory of fused conversion, and its time beside that of large products, and of a copy of what it writes."""
    sizes = make_checkpoint(folder / "small", layers, FUSED, 0)
    plain = make_plain(folder / "plain", layers * FUSED_BYTES)
    matmul_rate()
    rates, copies, runs = [], [], []
    for _ in range(rounds):
        rates.append(statistics.median(matmul_rate() for _ in range(3)))
        copies.append(copy(plain, folder / "copied"))
        runs.append(convert(folder / "small", folder / "out", form="fused"))
    plain.unlink()
    shutil.rmtree(folder / "small")
    products, copied = layers * FLOPS / statistics.median(rates), statistics.median(copies)
    taken = statistics.median(run["seconds"] for run in runs)
    return {
        "checkpoint": sizes,
        "bytes": layers * FUSED_BYTES,
        "matmul_rates": rates,
        "copy_seconds": copies,
        "runs": runs,
        "of_matmul_rate": products / taken,
        "of_copy_rate": copied / taken,
        "largest_tensor": 2 * D * H * C,
    }


def check_memory(result: dict[str, Any], bare: float) -> None:
    """Add what a run took beyond the bare import, and what it may take."""
    result["peak_above_import"] = max(run["peak"] for run in result["runs"]) - bare
    result["allowed"] = 3 * result["largest_tensor"] + 400_000_000
    result["within"] = result["peak_above_import"] <= result["allowed"]


def show(name: str, result: dict[str, Any]) -> None:
    """One line for a person."""
    peak, allowed = result["peak_above_import"] / 1e6, result["allowed"] / 1e6
    rates = [
        f"{100 * result[f'of_{rate}_rate']:.0f} % of the {words}"
        for rate, words in RATES
        if f"of_{rate}_rate" in result
    ]
    print(f"{name}: {' and '.join(rates)}, {peak:.0f} MB above import of {allowed:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--fused-layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=pathlib.Path, help="where to work; by default the system's temporary folder")
    recording.add_json(parser)
    given = parser.parse_args()
    needed = 3 * given.layers * 2 * H * (N + V) * C + given.fused_layers * 4_000_000_000
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="mla-convert-bench-") as name:
        folder = pathlib.Path(name)
        if shutil.disk_usage(folder).free < 1.2 * needed:
            raise SystemExit(f"{folder} has too little space; {1.2 * needed / 1e9:.0f} GB are needed (--folder)")
        bare = convert(folder, folder / "none")["peak"]
        results: dict[str, Any] = {}
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "factored": lambda: measure_factored(folder, given.layers, given.rounds),
            "fused": lambda: measure_fused(folder, given.fused_layers, given.rounds),
        }
        for kind, measure in measures.items():
            results[kind] = measure()
            check_memory(results[kind], bare)
            show(kind, results[kind])
    machine = describe_machine(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0))
    record = {"machine": vars(machine), "cores": cores, "bare_import": bare, **results}
    recording.write(parser, given, record, aside=("folder",))


if __name__ == "__main__":
    main()
