"""Where a measurement was taken: device, threads and versions, without which no figure means anything."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import platform
import re

import torch

from mla_convert.version import __version__


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device by its maker's name, PyTorch's threads on the CPU, and the versions of what ran."""

    device: str
    threads: int
    system: str
    python: str
    torch: str
    transformers: str
    mla_convert: str


def describe_machine(device: torch.device) -> Machine:
    """This machine as ``device`` sees it."""
    return Machine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        mla_convert=__version__,
    )


def device_name(device: torch.device) -> str:
    """What the device is called: ``NVIDIA H200``, ``Intel(R) Xeon(R) …``; its type where nobody says more."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name() if device.type == "cpu" else str(device)


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")  # on Linux, platform.processor() is empty
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8"), re.M) if info.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done everything it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
