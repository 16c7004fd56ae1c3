"""Compiling Triton kernels ahead of time, for GPUs that are not here, and reading what came out.

Compilation happens in processes of its own: where the interpreter was asked for, kernels cannot be compiled in
this one.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from machine_code import read_loops

from mla_convert.kernels.tiles import SHARED_LIMIT

TARGETS = tuple(SHARED_LIMIT)
_MATRIX = re.compile(r"\b(HGMMA|UTC[A-Z]*MMA|HMMA|v_mfma_[a-z0-9_]+)")
_NARROW_LOAD = re.compile(r"LDG\S*\.[US](?:8|16)\b|(?:global|buffer)_load_[us]?(?:byte|short)")
_WIDE_LOAD = re.compile(r"LDG\S*\.128|LDGSTS\S*\.128|(?:global|buffer)_load_dwordx4")


@dataclasses.dataclass(frozen=True)
class Request:
    """One kernel, specialised and compiled for one target.

    ``signature`` has the types of the arguments that are not constants ("*bf16", "i32", …), ``divisible`` names those
    that are multiples of 16, ``constants`` the values of all others (also of strides that are 1).
    """

    module: str
    function: str
    target: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes of a GPU.

    ``shared`` bytes per program; ``tensor_memory`` columns (sm_100); ``registers`` per thread; ``spills`` bytes of
    stack on NVIDIA, spilled registers on AMD; ``loop_spills`` instructions inside loops that move them; ``matrix`` the
    matrix instructions; ``wide_loads`` and ``narrow_loads`` the numbers of global loads of 16 bytes a thread, and of 1
    or 2; ``loop_loads`` those of 16 bytes inside loops.
    """

    shared: int
    tensor_memory: int
    registers: int
    spills: int
    loop_spills: int
    matrix: tuple[str, ...]
    wide_loads: int
    narrow_loads: int
    loop_loads: int


def compile_all(requests: Iterable[Request], processes: int = 2) -> list[Compiled]:
    """Compile every request, in order, in that many processes beside this one."""
    asked = [dataclasses.asdict(request) for request in requests]
    shares = [share for share in (asked[i::processes] for i in range(processes)) if share]
    with ThreadPoolExecutor(len(shares) or 1) as pool:
        answers = list(pool.map(_in_a_process, shares))
    results: list[Compiled] = []
    for i in range(len(asked)):
        answer = answers[i % processes][i // processes]
        results.append(Compiled(**answer | {"matrix": tuple(answer["matrix"])}))
    return results


def _in_a_process(share: list[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__], input=json.dumps(share), capture_output=True, text=True, env=environment
    )
    if run.returncode:
        raise RuntimeError(f"compiling ahead of time failed:\n{run.stderr}")
    answers: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return answers


def compile_one(request: Request) -> Compiled:
    """Compile in this process, where the interpreter must not have been asked for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request.module), request.function)
    signature = {name: request.signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in request.divisible}
    source = ASTSource(kernel, signature, dict(request.constants), attrs)
    if request.target.startswith("gfx"):
        target = GPUTarget("hip", request.target, 64)
    else:
        target = GPUTarget("cuda", int(request.target.removeprefix("sm_")), 32)
    built = triton.compile(source, target=target, options=dict(request.options))
    return _read(built, request.target)


def _read(built: Any, target: str) -> Compiled:
    if target.startswith("gfx"):
        text = built.asm["amdgcn"]
        registers, spills = _number(text, r"\.vgpr_count:\s+(\d+)"), _number(text, r"\.vgpr_spill_count:\s+(\d+)")
    else:
        usage, text = _inspect(built.asm["cubin"])
        registers, spills = _number(usage, r"REG:(\d+)"), _number(usage, r"STACK:(\d+)")
    loops = read_loops(text)
    return Compiled(
        shared=built.metadata.shared,
        tensor_memory=getattr(built.metadata, "tmem_size", 0) or 0,
        registers=registers,
        spills=spills,
        loop_spills=loops.spills,
        matrix=tuple(sorted(set(_MATRIX.findall(text)))),
        wide_loads=len(_WIDE_LOAD.findall(text)),
        narrow_loads=len(_NARROW_LOAD.findall(text)),
        loop_loads=loops.loads.get(16, 0),
    )


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[:2000]}"
    return int(found[1])


def _inspect(cubin: bytes) -> tuple[str, str]:
    """Resource usage and instructions of a cubin, by the tools that come with Triton."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, sass = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, sass


if __name__ == "__main__":
    found = [dataclasses.asdict(compile_one(Request(**request))) for request in json.load(sys.stdin)]
    print(json.dumps(found))
