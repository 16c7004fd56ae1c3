"""The work of storing absorbed weights: one unit for each layer, and the manifest made of what the units remember."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mla_convert.absorption import product_dtype
from mla_convert.checkpoint import Checkpoint
from mla_convert.coding import Rounder, code_tensor, nearest, tag_of
from mla_convert.destination import SHARD
from mla_convert.formats import plain
from mla_convert.job import Job
from mla_convert.journal import fingerprint
from mla_convert.manifest import Manifest, Source, SourceTensor, StoredLayer, StoredTensor, source_to_dict
from mla_convert.manifest_reading import source_from_dict
from mla_convert.memory import Memory, Scratch
from mla_convert.products import Operands, block_ranges, heads_of, make_block, read_operands
from mla_convert.recipe import PlannedLayer
from mla_convert.rounding import Rounding
from mla_convert.shard_plan import FileTensor, PlannedFile, plan_shards
from mla_convert.watch import Watch
from mla_convert.work import Block, Loaded, Made, Unit


def sidecar_job(
    checkpoint: Checkpoint,
    planned: Sequence[PlannedLayer],
    watch: Watch,
    *,
    device: torch.device,
    max_shard_bytes: int,
    prefix: str = "",
    rounder: Rounder = nearest,
) -> Job:
    """The job of storing ``planned`` in files whose names begin with ``prefix``."""
    shards = plan_shards([_file_tensors(layer) for layer in planned], max_shard_bytes)
    files = tuple(
        PlannedFile(prefix + SHARD.format(number=number, total=len(shards)), tensors)
        for number, tensors in enumerate(shards, start=1)
    )
    places = {
        tensor.name: (number, file.starts[tensor.name]) for number, file in enumerate(files) for tensor in file.tensors
    }
    memory = Memory()
    units = tuple(
        Unit(
            key=f"layer {layer.spec.index}",
            files=tuple(sorted({places[tensor.name][0] for tensor in _file_tensors(layer)})),
            memory=_operand_bytes(checkpoint, layer),
            load=functools.partial(_load, checkpoint, layer, watch, places, device, rounder, memory),
        )
        for layer in planned
    )
    plan = fingerprint(
        files=[[file.name, hashlib.sha256(file.header).hexdigest()] for file in files],
        source=[watch.origin, watch.stamps],
        device=device.type,
        products=[plain(product_dtype()), torch.__version__],
        rounding=tag_of(rounder),
    )
    read = max(checkpoint.stored_bytes(name) for layer in planned for name in layer.sources)
    written = max(tensor.nbytes for layer in planned for tensor in layer.tensors.values())
    return Job(files, units, plan, largest=max(read, written), release=memory.release)


def _file_tensors(layer: PlannedLayer) -> list[FileTensor]:
    parts = (part for tensor in layer.tensors.values() for part in tensor.parts)
    return [FileTensor(part.name, part.shape, part.dtype) for part in parts]


def _operand_bytes(checkpoint: Checkpoint, layer: PlannedLayer) -> int:
    """Bytes of a layer's weights in the dtype of the products, and of what has to be whole before it is coded.

    More than is held where weights are read by rows; it is the measure of a layer's work, too.
    """
    shapes = [checkpoint.info(name).shape for name in layer.sources]
    shapes += [tensor.shape for tensor in layer.tensors.values() if tensor.scheme is not None]
    return sum(torch.Size(shape).numel() * torch.float32.itemsize for shape in shapes)


def _load(
    checkpoint: Checkpoint,
    layer: PlannedLayer,
    watch: Watch,
    places: Mapping[str, tuple[int, int]],
    device: torch.device,
    rounder: Rounder,
    memory: Memory,
) -> Loaded:
    with watch.reading(layer.sources):
        operands = read_operands(checkpoint, layer, device, memory)
    tasks: list[Callable[[], Made]] = []
    for key, tensor in layer.tensors.items():
        if tensor.scheme is not None:
            tasks.append(functools.partial(_code, checkpoint, operands, layer, key, places, rounder))
            continue
        ranges = block_ranges(key, layer.spec.geometry, tensor.nbytes // tensor.shape[0])
        made = functools.partial(_make, operands, layer, key, places[tensor.name], memory.scratch)
        tasks += [functools.partial(made, rows) for rows in ranges]

    def remember(known: list[tuple[str, Rounding | StoredTensor]]) -> dict[str, Any]:
        return {
            "tensors": {key: _figures(tensor, key, known) for key, tensor in layer.tensors.items()},
            "sources": {name: source_to_dict(tensor) for name, tensor in operands.sources().items()},
        }

    watched = [functools.partial(_watched, watch, layer.sources, task) for task in tasks]
    return Loaded(watched, remember, release=operands.release)


def _watched(watch: Watch, names: Sequence[str], task: Callable[[], Made]) -> Made:
    with watch.reading(names):
        return task()


def _make(
    operands: Operands,
    layer: PlannedLayer,
    key: str,
    place: tuple[int, int],
    scratch: Scratch,
    rows: tuple[int, int],
) -> Made:
    tensor = layer.tensors[key]
    rounding, geometry = Rounding(tensor.name), layer.spec.geometry
    file, start = place[0], place[1] + rows[0] * (tensor.nbytes // tensor.shape[0])
    if key in ("k_b", "v_b") and tensor.dtype == operands.kv_b.dtype:
        return Made([Block(file, start, heads_of(operands, geometry, key, rows))], (key, rounding))
    if operands.kv_b.device.type != "cpu":
        return Made(
            [Block(file, start, make_block(operands, geometry, key, rows, tensor.dtype, rounding))], (key, rounding)
        )
    out, release = scratch.take((rows[1] - rows[0], *tensor.shape[1:]), tensor.dtype)
    block = make_block(operands, geometry, key, rows, tensor.dtype, rounding, out)
    return Made([Block(file, start, block, made=key in ("qk", "ov"))], (key, rounding), release)


def _code(
    checkpoint: Checkpoint,
    operands: Operands,
    layer: PlannedLayer,
    key: str,
    places: Mapping[str, tuple[int, int]],
    rounder: Rounder,
) -> Made:
    stored, parts = code_tensor(checkpoint, operands, layer.spec, key, layer.tensors[key], rounder)
    return Made([Block(*places[name], part) for name, part in parts.items()], (key, stored))


def _figures(planned: StoredTensor, key: str, known: list[tuple[str, Rounding | StoredTensor]]) -> dict[str, Any]:
    """What is known of a stored tensor now, and was not when it was planned."""
    rounding = Rounding(planned.name)
    for of, each in known:
        if of == key and isinstance(each, StoredTensor):
            names = ("largest_error", "frobenius_error", "rounding")
            return {name: getattr(each, name) for name in names}
        if of == key and isinstance(each, Rounding):
            rounding.add(each)
    return {"largest_error": rounding.largest, "frobenius_error": rounding.frobenius}


def make_manifest(
    checkpoint: Checkpoint, planned: Sequence[PlannedLayer], remembered: Mapping[str, dict[str, Any]]
) -> Manifest:
    """The manifest of ``planned``, with what the units of :func:`sidecar_job` remember."""
    layers: list[StoredLayer] = []
    sources: dict[str, SourceTensor] = {}
    for layer in planned:
        data = remembered[f"layer {layer.spec.index}"]
        tensors = {key: dataclasses.replace(tensor, **data["tensors"][key]) for key, tensor in layer.tensors.items()}
        spec, forms = layer.spec, layer.forms
        layers.append(StoredLayer(spec.index, spec.geometry, forms.qk, forms.vo, tensors, layer.sources))
        for name, entry in data["sources"].items():
            sources[name] = source_from_dict(name, entry, "the journal of this run")
    text = json.dumps(checkpoint.raw_config, sort_keys=True, separators=(",", ":")).encode()
    source = Source(
        model_type=str(checkpoint.config["model_type"]),
        layout=checkpoint.layout,
        config_sha256=hashlib.sha256(text).hexdigest(),
        tensors=sources,
    )
    return Manifest(source, tuple(layers), dtype_of(tensor for layer in planned for tensor in layer.tensors.values()))


def dtype_of(tensors: Iterable[StoredTensor]) -> str:
    """The dtype of all ``tensors``, or ``mixed``."""
    names = sorted({plain(tensor.dtype) for tensor in tensors})
    return names[0] if len(names) == 1 else "mixed"
