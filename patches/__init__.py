"""Patching transformers models so that they decode in latent space."""

from mla_convert.patches.apply import PatchDescription, PatchHandle, patch, patched, unpatch
from mla_convert.patches.cache import LatentCache
from mla_convert.patches.parallel import tp_plan

__all__ = ["LatentCache", "PatchDescription", "PatchHandle", "patch", "patched", "tp_plan", "unpatch"]
