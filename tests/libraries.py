"""Importing libraries that put other modules or tensors in the place of a projection's weight."""

from __future__ import annotations

import importlib
import warnings
from typing import Any
from unittest import mock

import huggingface_hub.constants


def library(name: str) -> Any:
    """A library, imported without its warnings, and without the kernels that bitsandbytes would fetch from the hub."""
    with warnings.catch_warnings(), mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        warnings.simplefilter("ignore")
        if name == "peft":
            importlib.import_module("bitsandbytes")  # as PEFT itself does, wherever it is first needed
        return importlib.import_module(name)
