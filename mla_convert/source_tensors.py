"""Which tensors of a source absorbed weights were made from."""

from __future__ import annotations

from mla_convert.checkpoint import Checkpoint
from mla_convert.formats import plain
from mla_convert.manifest import SourceTensor


def describe_source(checkpoint: Checkpoint, name: str, sha256: str | None = None) -> SourceTensor:
    """What the manifest records of one source tensor; reads it, where its hash is not given."""
    info, scheme = checkpoint.info(name), checkpoint.scheme(name)
    return SourceTensor(
        name=name,
        shape=info.shape,
        dtype=plain(info.dtype),
        sha256=sha256 or checkpoint.digest(name),
        source_dtype=checkpoint.source_dtype(name),
        form=None if scheme is None else scheme.label,
        companions=checkpoint.companion_digests(name),
    )
