"""Convert a checkpoint: the options, checked, and the run that does it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_convert.checkpoint import Checkpoint
from mla_convert.coding import Rounder, nearest
from mla_convert.conversion_report import ConversionReport, make_report
from mla_convert.destination import FOLDER, MANIFEST, check_space
from mla_convert.errors import UsageError
from mla_convert.hub import HubPath
from mla_convert.hub_snapshots import local_folder
from mla_convert.manifest import Manifest
from mla_convert.manifest_reading import read_manifest
from mla_convert.order import Order, order_layout, order_sidecar, order_standalone
from mla_convert.origin import origin_of
from mla_convert.paths import path_of, source_of
from mla_convert.placing import check_link, place
from mla_convert.publishing import Publisher, check_repository
from mla_convert.ranks import World
from mla_convert.recipe import (
    SIDES,
    Side,
    check_options,
    parse_device,
    parse_dtype,
    parse_forms,
    plan_layers,
    refuse_recipe,
)
from mla_convert.remains import reusable
from mla_convert.run import Run
from mla_convert.schemes import Scheme, parse_schemes
from mla_convert.sidecar import make_manifest
from mla_convert.wording import option
from mla_convert.work import default_workers

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
    calibrate: str | os.PathLike[str] | None = None,
    target: str = "sidecar",
    parts: int | None = None,
    link: str = "auto",
    workers: int | None = None,
    resume: bool = True,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
    measure: bool = False,
    max_shard_bytes: int | None = None,
    push: str | None = None,
    base_model: str | None = None,
    world: World | None = None,
) -> ConversionReport:
    """Precompute the absorbed weights of a checkpoint and store them beside it, or in a folder of their own.

    ``source`` is the checkpoint's folder, or ``org/name[@revision]`` on the hub; ``out`` is the folder to write (the
    source itself means its subfolder ``mla_absorbed``). ``form`` is ``factored``, ``fused`` or ``auto``, for both
    sides, and ``qk`` and ``vo`` override it for the key side and the value side; ``auto`` takes what reads fewer
    numbers per decode step. ``dtype`` is that of the stored weights: ``source`` (of a quantized source: the config's),
    ``bfloat16``, ``float16`` or ``float32``. ``quantize`` codes both sides, in ``int8`` (a scale per row), ``fp8`` or
    ``int4``; ``qk_bits`` and ``vo_bits`` (4, 8 or 16, which leaves it plain) override it for one side; ``group_size``
    is 32, 64 or 128 columns for int4, and for fp8 128 (blocks of 128×128) or ``row``. Codes are the nearest ones, or,
    where ``calibrate`` names a file of text, those that change least of what the model makes of it: the model is loaded
    and run over the text, of which one half finds the codes of each weight and the other half judges whether they beat
    the nearest. ``measure``, which ``calibrate`` implies, runs the model on held-out text afterwards (the source's
    ``held_out.txt``, or a text of this package) and reports what the codes cost.

    ``target`` is what is written: ``sidecar``, the absorbed weights alone; ``standalone``, a whole folder that
    ``from_pretrained`` loads as it is, with the absorbed weights inside and the source's files linked or copied
    (``link``: ``auto``, ``hard``, ``reflink`` or ``copy``); or the same values in another layout, Hugging Face's shards
    (``hf``) or the ``parts`` of DeepSeek's own code (``native``).

    ``device`` is where products are formed, by ``workers`` threads (by default one for each core, up to 16).
    ``progress`` is called with the layers done and their number. With ``dry_run`` everything is checked and planned,
    and nothing written. A run that was interrupted is gone on with, unless ``resume`` is False. ``world`` says that
    several processes share this one call, each of which makes it (:func:`mla_convert.ranks.launched` reads it from
    torchrun's environment).

    ``push`` names a repository on the hub, ``org/name``, which is made and gets what was written. ``base_model`` is the
    name on the hub that the model card gives the model, where neither ``source`` nor its config says it.

    The same source and options give the same bytes, whatever the workers, the processes and the interruptions.

    Raises UsageError for options and destinations that cannot be, SidecarError where writing fails, and whatever
    :meth:`Checkpoint.open` raises for the source. Nothing that is there is changed or overwritten.
    """
    started = time.perf_counter()
    schemes = dict(zip(SIDES, parse_schemes(quantize, qk_bits, vo_bits, group_size), strict=True))
    measured = measure or calibrate is not None
    if measured and not any(schemes.values()):
        raise UsageError(
            f"{option('calibrate')} and {option('measure')} are about quantized weights, and nothing is quantized: add "
            f"{option('quantize')}"
        )
    check_options(target, parts, workers, max_shard_bytes, link)
    if target in ("hf", "native"):
        refuse_recipe(target, form=form, qk=qk, vo=vo, dtype=dtype, quantize=quantize, qk_bits=qk_bits, vo_bits=vo_bits)
    recipe = _Recipe(parse_forms(form, qk, vo), parse_dtype(dtype), parse_device(device), schemes, calibrate)
    checkpoint = _take(source, out, whole=target != "sidecar" or measured)
    common = {"max_shard_bytes": max_shard_bytes, "dry_run": dry_run, "origin": origin_of(checkpoint, base_model)}
    order = _order(checkpoint, recipe, path_of(out, "OUT"), target, parts, link, common)
    needed = order.space + _SPARE_BYTES - reusable(order.goal.folder)
    check_space(order.goal.folder, needed, order.kept_in, order.bytes_kept)
    run = Run(order.goal, order.job, resume=resume, world=world)
    manifest, files = (None, ()) if dry_run else _carry_out(run, order, push, workers, progress)
    if dry_run and push is not None:
        check_repository(push)
        run.notes.append(f"whether {push} takes a push was not tried")
    if any(schemes.values()) and not measured:
        run.notes.append(
            f"what the codes cost the model was not measured: {option('measure', True)} reports KL and perplexity"
        )
    seconds = time.perf_counter() - started
    report = make_report(order, manifest, files, notes=run.notes, seconds=seconds, dry_run=dry_run)
    if dry_run or not measured or not run.world.leads:
        return report
    from mla_convert.quality import report_quality

    quality = report_quality(checkpoint.path, order.goal.folder, (schemes["qk"], schemes["vo"]))
    return dataclasses.replace(report, quality=quality, seconds=time.perf_counter() - started)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What is asked of the absorbed weights."""

    forms: dict[Side, str]
    dtype: torch.dtype | None
    device: torch.device
    schemes: dict[Side, Scheme | None]
    calibrate: str | os.PathLike[str] | None


def _take(source: str | os.PathLike[str] | Checkpoint, out: str | os.PathLike[str], *, whole: bool) -> Checkpoint:
    """The source, opened; UsageError where all of it would be needed, or written to, and it is on the hub."""
    checkpoint = source if isinstance(source, Checkpoint) else _open(source, whole=whole)
    if isinstance(checkpoint.path, HubPath) and (whole or (not isinstance(source, Checkpoint) and _same(source, out))):
        raise UsageError(
            f"{source} is a repository on the hub, which is read in parts and not written to; give a folder of its own "
            "as OUT, or download the model first: hf download"
        )
    return checkpoint


def _order(
    checkpoint: Checkpoint,
    recipe: _Recipe,
    folder: pathlib.Path,
    target: str,
    parts: int | None,
    link: str,
    common: dict[str, Any],
) -> Order:
    """What to write for ``target``; ``common`` is handed to whoever plans it."""
    if target in ("hf", "native"):
        return order_layout(checkpoint, target, folder, parts=parts, **common)
    planned = plan_layers(checkpoint, recipe.forms, recipe.dtype, recipe.schemes)
    common = common | {"device": recipe.device, "rounder": _rounder(checkpoint, recipe.calibrate)}
    if target == "standalone":
        return order_standalone(checkpoint, planned, folder, link=check_link(link), **common)
    return order_sidecar(checkpoint, planned, folder, **common)


def _carry_out(
    run: Run, order: Order, push: str | None, workers: int | None, progress: Callable[[int, int], None] | None
) -> tuple[Manifest | None, Sequence[str]]:
    """Write what was ordered, and push it where that is asked for; the manifest and the files' names."""
    publisher = Publisher(push) if push is not None and run.world.leads else None
    with run:
        run.work(workers or default_workers(run.world.local_size), progress)
        manifest, files = _finish(run, order)
    if publisher is not None:
        run.notes.append(f"pushed to {publisher.push(order.goal.folder, files)}")
    return manifest, files


def _same(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> bool:
    return source_of(source) == path_of(out, "OUT")


def _open(source: str | os.PathLike[str], *, whole: bool) -> Checkpoint:
    """The source; where all of it is needed, a hub id stands for its snapshot in the hub client's cache."""
    path = source_of(source)
    return Checkpoint.open(local_folder(path) if whole else path)


def _rounder(checkpoint: Checkpoint, text: str | os.PathLike[str] | None) -> Rounder:
    if text is None:
        return nearest
    # Loading and running a model belongs to the rooms above this one, and only this needs it.
    from mla_convert.calibration import Calibration

    return Calibration(checkpoint, text)


def _finish(run: Run, order: Order) -> tuple[Manifest | None, list[str]]:
    """Put the parts of all ranks together, or wait until the lead has; returns the manifest and the files' names."""
    if not run.world.leads:
        run.wait()
        return _written_manifest(order), []
    remembered = run.gather()
    order.watch.check_all()
    manifest = make_manifest(order.checkpoint, order.planned, remembered) if order.planned else None
    others = [*place(order.goal, order.linked, order.link), *place(order.goal, order.copied, "copy")]
    return manifest, run.commit(order.texts(manifest), others)


def _written_manifest(order: Order) -> Manifest | None:
    if not order.planned:
        return None
    file = order.goal.folder / (f"{FOLDER}/{MANIFEST}" if order.goal.whole else MANIFEST)
    return read_manifest(file.read_bytes(), where=str(file))
