"""Where the checks run and at what sizes: a GPU, or tiny sizes in Triton's interpreter on a CPU."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

import torch
import triton

from mla_convert import kernels
from mla_convert.kernels import triton_decode
from mla_convert.kernels.tiles import SHARED_LIMIT

CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if CPU else "cuda"
#: Of what is timed; correctness varies both. The interpreter multiplies the bit patterns of bfloat16.
LATENT, ROPE = (64, 16) if CPU else (512, 64)
DTYPE = torch.float32 if CPU else torch.bfloat16
#: Inputs rotate through at least this much, several times an L2 cache.
ROTATED_BYTES = 1 << 16 if CPU else 400 << 20

HEADS = (3, 16) if CPU else (16, 128, 64, 32)
BATCHES = (2,) if CPU else (64, 1, 16, 128)
HISTORIES = (70,) if CPU else (8192, 1024, 32768, 131072)
NEW_TOKENS = (1, 2) if CPU else (1, 2, 4)
MODELS = ("small",) if CPU else ("v3", "v2-lite")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem of decoding: ``new`` tokens per sequence."""

    heads: int
    batch: int
    history: int
    new: int = 1
    codes: str | None = None

    def __str__(self) -> str:
        coded = f" cache={self.codes}" if self.codes else ""
        return f"heads={self.heads} batch={self.batch} history={self.history} new={self.new}{coded}"

    @property
    def rows(self) -> int:
        """(new token, head) pairs of one sequence."""
        return self.heads * self.new


def grid() -> Iterator[Shape]:
    """Every shape that is timed, the most telling sizes first."""
    for new, history, batch, heads in itertools.product(NEW_TOKENS, HISTORIES, BATCHES, HEADS):
        yield Shape(heads, batch, history, new)


def arch() -> str:
    """The table's name of this GPU's architecture; what the interpreter runs on counts as sm_80."""
    return "sm_80" if CPU else triton_decode.device_arch(torch.device("cuda", 0))


def machine() -> dict[str, Any]:
    """What the figures belong to; another machine's, or another kernel's, go into another file."""
    names = ("torch", "triton", "transformers")
    found: dict[str, Any] = {name: _version(name) for name in names}
    found |= {"python": platform.python_version(), "device": platform.machine(), "kernels": _digest()}
    if not CPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "arch": arch(),
            "shared_limit_bytes": SHARED_LIMIT[arch()],
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _digest() -> str:
    """Of the kernels' sources."""
    folder = pathlib.Path(kernels.__file__).parent
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def free_bytes() -> int:
    """Memory that a problem may take."""
    if CPU:
        return 1 << 30
    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


assert triton.knobs.runtime.interpret == CPU, "TRITON_INTERPRET was set after Triton had been imported"
