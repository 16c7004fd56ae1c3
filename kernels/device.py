"""The GPU that tensors are on: what it is, and launching there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

#: The first CUDA compute capability that Triton compiles for.
OLDEST_CAPABILITY = (8, 0)


def too_old(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU that Triton does not compile for; never one that this machine does not have."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) < OLDEST_CAPABILITY


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, which in a model spread over several need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
