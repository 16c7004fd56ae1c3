"""One conversion, planned: what is read, which files come of it, and what goes beside them. Reads no data."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mla_convert import export, hub_ranges
from mla_convert.checkpoint import Checkpoint
from mla_convert.coding import Rounder, nearest
from mla_convert.destination import CARD, CONFIG, FOLDER, INDEX, MANIFEST, Goal, destination
from mla_convert.errors import UsageError
from mla_convert.hub import HubPath
from mla_convert.job import Job
from mla_convert.manifest import Manifest
from mla_convert.model_card import layout_card, model_card, standalone_card
from mla_convert.native import hf_config, is_native_config
from mla_convert.native_export import native_config
from mla_convert.origin import Origin
from mla_convert.placing import companions, needs_copies
from mla_convert.recipe import PlannedLayer
from mla_convert.shard_plan import index_text
from mla_convert.sidecar import sidecar_job
from mla_convert.watch import Watch
from mla_convert.wording import option
from mla_convert.writing import MAX_SHARD_BYTES


@dataclasses.dataclass(frozen=True)
class Order:
    """A conversion of ``checkpoint`` into ``target``.

    ``planned`` are the layers whose absorbed weights are stored. ``linked`` and ``copied`` are files of the source that
    come along, by the names they get; ``takes_copies`` says that what is to be linked has to be copied here.
    """

    checkpoint: Checkpoint
    target: str
    goal: Goal
    job: Job
    watch: Watch
    origin: Origin
    planned: Sequence[PlannedLayer] = ()
    linked: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    copied: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    link: str = "auto"
    takes_copies: bool = False
    notes: tuple[str, ...] = ()

    @property
    def bytes_in(self) -> int:
        """Bytes of the source's tensors that are read to be worked on."""
        if self.planned:
            names = {name for layer in self.planned for name in layer.sources}
            return sum(self.checkpoint.stored_bytes(name) for name in names)
        return sum(tensor.nbytes for file in self.job.files for tensor in file.tensors)

    @property
    def bytes_out(self) -> int:
        """Bytes of the tensors that are written, and of the files that are copied."""
        made = sum(tensor.nbytes for file in self.job.files for tensor in file.tensors)
        return made + self._copied_bytes()

    def _copied_bytes(self) -> int:
        copied = [*self.copied.values(), *(self.linked.values() if self.takes_copies else ())]
        return sum(file.stat().st_size for file in copied)

    @property
    def kept_in(self) -> pathlib.Path | None:
        """Where what is read from the hub is kept; None for a source on a disk."""
        path = self.checkpoint.path
        return hub_ranges.folder(path.repo_id, path.commit) if isinstance(path, HubPath) else None

    @functools.cached_property
    def bytes_kept(self) -> int:
        """Bytes that are fetched from the hub and stay on this machine (:mod:`mla_convert.hub_ranges`)."""
        return self.checkpoint.bytes_to_fetch(name for layer in self.planned for name in layer.sources)

    @property
    def space(self) -> int:
        """Bytes that the disk must have free, but for the small texts."""
        return self.job.bytes_out + self._copied_bytes()

    def texts(self, manifest: Manifest | None) -> dict[str, str]:
        """The small files, by name; the one that makes the rest complete comes last."""
        if manifest is not None:
            prefix = f"{FOLDER}/" if self.target == "standalone" else ""
            texts = {
                prefix + INDEX: index_text(self.job.files),
                prefix + CARD: model_card(manifest, self.origin),
                prefix + MANIFEST: manifest.to_json(),
            }
            if self.target == "sidecar" and (self.goal.folder / CARD).exists():
                del texts[CARD]
            if self.target == "sidecar":
                return texts
            config = (self.checkpoint.path / CONFIG).read_text("utf-8")
            return texts | {CARD: standalone_card(manifest, self.origin), CONFIG: config}
        if self.target == "hf":
            index = {export.HF_INDEX: index_text(self.job.files)}
            return index | self._card() | {CONFIG: _text(_hf_config(self.checkpoint))}
        return self._card() | {CONFIG: _text(_native_config(self.checkpoint))}

    def _card(self) -> dict[str, str]:
        files, model_type = [file.name for file in self.job.files], str(self.checkpoint.config["model_type"])
        return {CARD: layout_card(self.target, files, model_type, self.origin, self.notes)}


def order_sidecar(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedLayer],
    out: pathlib.Path,
    *,
    origin: Origin,
    device: torch.device,
    max_shard_bytes: int | None,
    dry_run: bool,
    rounder: Rounder = nearest,
) -> Order:
    """Absorbed weights in a folder of their own, or beside their source."""
    goal = destination(checkpoint.path, out, dry_run=dry_run)
    watch = Watch(checkpoint, [name for layer in planned for name in layer.sources])
    most = max_shard_bytes or MAX_SHARD_BYTES
    job = sidecar_job(checkpoint, planned, watch, device=device, max_shard_bytes=most, rounder=rounder)
    notes: tuple[str, ...] = ()
    if (goal.folder / CARD).exists():
        notes = (f"{goal.folder} already has a {CARD}; it was left as it is, and no model card was written",)
    return Order(checkpoint, "sidecar", goal, job, watch, origin, planned, notes=notes)


def order_standalone(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedLayer],
    out: pathlib.Path,
    *,
    origin: Origin,
    device: torch.device,
    max_shard_bytes: int | None,
    link: str,
    dry_run: bool,
    rounder: Rounder = nearest,
) -> Order:
    """A whole model with its absorbed weights inside. UsageError for a source that from_pretrained does not load."""
    if checkpoint.layout == "native":
        raise UsageError(
            "SOURCE is in DeepSeek's native layout, which from_pretrained does not load; convert it with "
            f"{option('target', 'hf')} first, and that with {option('target', 'standalone')}"
        )
    _refuse_hub(checkpoint, "standalone")
    goal = destination(checkpoint.path, out, whole=True, dry_run=dry_run)
    watch = Watch(checkpoint, checkpoint.names())
    most = max_shard_bytes or MAX_SHARD_BYTES
    prefix = f"{FOLDER}/"
    job = sidecar_job(checkpoint, planned, watch, device=device, max_shard_bytes=most, prefix=prefix, rounder=rounder)
    linked = {file: checkpoint.path / file for file in watch.stamps}
    index = checkpoint.path / export.HF_INDEX
    copied = companions(checkpoint.path) | ({export.HF_INDEX: index} if index.exists() else {})
    copies = link == "copy" or needs_copies(linked.values(), goal.folder, link)
    return Order(checkpoint, "standalone", goal, job, watch, origin, planned, linked, copied, link, copies)


def order_layout(
    checkpoint: Checkpoint,
    target: str,
    out: pathlib.Path,
    *,
    origin: Origin,
    parts: int | None,
    max_shard_bytes: int | None,
    dry_run: bool,
) -> Order:
    """The same values in another layout: ``hf`` or ``native``."""
    _refuse_hub(checkpoint, target)
    goal = destination(checkpoint.path, out, whole=True, dry_run=dry_run)
    watch = Watch(checkpoint, checkpoint.names())
    if target == "hf":
        job = export.hf_job(checkpoint, watch, max_shard_bytes or export.MODEL_SHARD_BYTES)
        return Order(checkpoint, target, goal, job, watch, origin, copied=companions(checkpoint.path))
    export.refuse_unsaid_formats(checkpoint)
    _native_config(checkpoint)
    job, left = export.native_job(checkpoint, watch, parts or 1)
    notes: tuple[str, ...] = ()
    if left:
        notes = (
            f"{len(left)} tensors were left out, which DeepSeek's inference code does not load (layers for multi-token "
            "prediction, and stored frequencies)",
        )
    copied = companions(checkpoint.path, code=False)
    return Order(checkpoint, target, goal, job, watch, origin, copied=copied, notes=notes)


def _refuse_hub(checkpoint: Checkpoint, target: str) -> None:
    """UsageError for a whole model out of a hub repository of which only the needed bytes are read."""
    if isinstance(checkpoint.path, HubPath):
        raise UsageError(
            f"{option('target', target)} takes every byte of {checkpoint.path.repo_id}: fetch it first with `hf "
            f"download {checkpoint.path.repo_id} --local-dir DIR`, and convert DIR; a sidecar "
            "needs no more than its own tensors"
        )


def _hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config in Hugging Face's keys: the source's own, or what DeepSeek's keys mean."""
    if not is_native_config(checkpoint.raw_config):
        return checkpoint.raw_config
    return hf_config(checkpoint.raw_config)


def _native_config(checkpoint: Checkpoint) -> dict[str, Any]:
    whole = _hf_config(checkpoint)
    return native_config(checkpoint.config, whole.get("quantization_config") or None)


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"
