"""Patching transformers models so that they decode in latent space."""

from mla_convert.patches.versions import check_transformers

check_transformers()  # first: what is imported below is not there in other releases

from mla_convert.patches.apply import PatchHandle, patch, patched, unpatch  # noqa: E402
from mla_convert.patches.cache import LatentCache  # noqa: E402
from mla_convert.patches.description import PatchDescription  # noqa: E402
from mla_convert.patches.parallel import tp_plan  # noqa: E402

__all__ = ["LatentCache", "PatchDescription", "PatchHandle", "patch", "patched", "tp_plan", "unpatch"]
