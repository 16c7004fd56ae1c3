"""Which tensors of a source absorbed weights were made from."""

from __future__ import annotations

from torch import Tensor

from mla_convert.checkpoint import Checkpoint
from mla_convert.digest import tensor_digest
from mla_convert.formats import plain
from mla_convert.manifest import SourceTensor


def describe_source(checkpoint: Checkpoint, name: str, stored: Tensor | None = None) -> SourceTensor:
    """What the manifest records of one source tensor; reads it to hash it, where it is not given as ``stored``."""
    info, scheme = checkpoint.info(name), checkpoint.scheme(name)
    return SourceTensor(
        name=name,
        shape=info.shape,
        dtype=plain(info.dtype),
        sha256=checkpoint.digest(name) if stored is None else tensor_digest(stored),
        source_dtype=checkpoint.source_dtype(name),
        form=None if scheme is None else scheme.label,
        companions=checkpoint.companion_digests(name),
    )
