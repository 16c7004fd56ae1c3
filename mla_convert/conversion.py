"""Convert a checkpoint: the options, checked, and the run that does it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion_report import ConversionReport, make_report
from mla_convert.destination import CARD, INDEX, MANIFEST, check_space, destination
from mla_convert.errors import UsageError
from mla_convert.manifest import Manifest, StoredLayer
from mla_convert.manifest_reading import read_manifest
from mla_convert.model_card import model_card
from mla_convert.paths import path_of
from mla_convert.ranks import World
from mla_convert.recipe import (
    PlannedLayer,
    check_options,
    parse_device,
    parse_dtype,
    parse_forms,
    plan_layers,
)
from mla_convert.remains import reusable
from mla_convert.run import Run
from mla_convert.schemes import parse_schemes
from mla_convert.sidecar import index_text, make_manifest, sidecar_job
from mla_convert.watch import Watch
from mla_convert.work import default_workers
from mla_convert.writing import MAX_SHARD_BYTES

_SPARE_BYTES = 1 << 20  # manifest, index, card and journal, beside the tensors


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    form: str = "auto",
    qk: str | None = None,
    vo: str | None = None,
    dtype: str | torch.dtype = "source",
    quantize: str | None = None,
    qk_bits: int | None = None,
    vo_bits: int | None = None,
    group_size: int | str | None = None,
    calibrate: None = None,
    target: str = "sidecar",
    workers: int | None = None,
    resume: bool = True,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    world: World | None = None,
) -> ConversionReport:
    """Precompute the absorbed weights of a checkpoint and store them beside it, or in a folder of their own.

    ``source`` is the checkpoint's folder, ``out`` the folder to write (``source`` itself means its subfolder
    ``mla_absorbed``). ``form`` is ``factored``, ``fused`` or ``auto``, for both sides, and ``qk`` and ``vo`` override
    it for the key side and the value side; ``auto`` takes what reads fewer numbers per decode step. ``dtype`` is that
    of the stored weights: ``source`` (of a quantized source: the config's), ``bfloat16``, ``float16`` or ``float32``.
    ``quantize`` codes both sides, in ``int8`` (a scale per row), ``fp8`` or ``int4``; ``qk_bits`` and ``vo_bits`` (4, 8
    or 16, which leaves it plain) override it for one side; ``group_size`` is 32, 64 or 128 columns for int4, and for
    fp8 128 (blocks of 128×128) or ``row``.

    ``device`` is where products are formed, by ``workers`` threads (by default one for each core, up to 16).
    ``progress`` is called with the layers done and their number. With ``dry_run`` everything is checked and planned,
    and nothing written. A run that was interrupted is gone on with, unless ``resume`` is False. ``world`` says that
    several processes share this one call, each of which makes it (:func:`mla_convert.ranks.launched` reads it from
    torchrun's environment).

    The same source and options give the same bytes, whatever the workers, the processes and the interruptions.

    Raises UsageError for options and destinations that cannot be, SidecarError where writing fails, and whatever
    :meth:`Checkpoint.open` raises for the source. Nothing that is there is changed or overwritten.
    """
    started = time.perf_counter()
    if calibrate is not None:
        raise UsageError(f"calibrate={calibrate!r}: this version rounds to the nearest code; leave it out")
    qk_scheme, vo_scheme = parse_schemes(quantize, qk_bits, vo_bits, group_size)
    check_options(target, workers, max_shard_bytes)
    wanted = parse_forms(form, qk, vo)
    stored_dtype, where = parse_dtype(dtype), parse_device(device)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    planned = plan_layers(checkpoint, wanted, stored_dtype, {"qk": qk_scheme, "vo": vo_scheme})
    watch = Watch(checkpoint, [name for layer in planned for name in layer.sources])
    job = sidecar_job(checkpoint, planned, watch, device=where, max_shard_bytes=max_shard_bytes)
    goal = destination(checkpoint.path, path_of(out, "OUT"), dry_run=dry_run)
    check_space(goal.folder, job.bytes_out + _SPARE_BYTES - reusable(goal.folder))
    run = Run(goal, job, resume=resume, world=world)
    stored: Sequence[StoredLayer] | None = None
    files: tuple[str, ...] = ()
    if not dry_run:
        with run:
            run.work(workers or default_workers(run.world.local_size), progress)
            manifest, files = _finish(run, checkpoint, planned, watch)
        stored = manifest.layers
    return make_report(checkpoint, planned, goal.folder, stored, files, run.notes, time.perf_counter() - started)


def _finish(
    run: Run, checkpoint: Checkpoint, planned: Sequence[PlannedLayer], watch: Watch
) -> tuple[Manifest, tuple[str, ...]]:
    """Put the parts of all ranks together, or wait until the lead has; returns the manifest and the files' names."""
    folder = run.goal.folder
    if not run.world.leads:
        run.wait()
        file = folder / MANIFEST
        return read_manifest(file.read_bytes(), where=str(file)), ()
    manifest = make_manifest(checkpoint, planned, run.gather())
    watch.check(name for layer in planned for name in layer.sources)
    texts = {
        INDEX: index_text(run.job.files),
        CARD: model_card(manifest, checkpoint.raw_config),
        MANIFEST: manifest.to_json(),
    }
    if (folder / CARD).exists():
        del texts[CARD]
    return manifest, tuple(run.commit(texts))
