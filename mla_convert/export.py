"""A checkpoint in another layout with the same values: DeepSeek's parts, or Hugging Face's shards.

One unit for each tensor as stored, codes and scales alike, and each file that gets a share of it, so that processes can
divide the files among them; nothing is computed, so every value keeps its bits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence

import torch

from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import FormatError, UsageError
from mla_convert.job import Job
from mla_convert.journal import fingerprint
from mla_convert.memory import Buffers
from mla_convert.native import Placement
from mla_convert.native_export import native_name
from mla_convert.shard_plan import FileTensor, PlannedFile, plan_shards
from mla_convert.watch import Watch
from mla_convert.wording import option
from mla_convert.work import Block, Loaded, Made, Unit

HF_SHARD = "model-{number:05d}-of-{total:05d}.safetensors"
HF_INDEX = "model.safetensors.index.json"
NATIVE_PART = "model{part}-mp{parts}.safetensors"
#: Data of one file of a whole model, as transformers' readers like it.
MODEL_SHARD_BYTES = 5_000_000_000
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one file holds a tensor: the name there, and which slice (along an axis, from, to), None for all of it."""

    file: int
    name: str
    cut: tuple[int, int, int] | None = None


def hf_job(checkpoint: Checkpoint, watch: Watch, max_shard_bytes: int) -> Job:
    """The job of writing all tensors into Hugging Face's shards, in the order of their layers."""
    names = sorted(checkpoint.names(), key=_order)
    shards = plan_shards([[_file_tensor(checkpoint, name)] for name in names], max_shard_bytes)
    files = [
        PlannedFile(HF_SHARD.format(number=number, total=len(shards)), tensors)
        for number, tensors in enumerate(shards, start=1)
    ]
    listed = [(number, tensor.name) for number, file in enumerate(files) for tensor in file.tensors]
    places = {name: [_Place(number, name)] for number, name in listed}
    return _job(checkpoint, watch, files, places)


def native_job(checkpoint: Checkpoint, watch: Watch, parts: int) -> tuple[Job, list[str]]:
    """The job of writing DeepSeek's ``parts`` parts, and the names of tensors that its layout leaves out.

    Left out are layers for multi-token prediction, which DeepSeek's inference code does not load, and the frequencies
    that old checkpoints carry. UsageError where a tensor cannot be shared among so many parts.
    """
    layers, heads = len(checkpoint.layers), checkpoint.layers[0].geometry.num_heads
    kept: list[str] = []
    left: list[str] = []
    for name in sorted(checkpoint.names(), key=_order):
        number = re.match(r"model\.layers\.(\d+)\.", name)
        beyond = number is not None and int(number.group(1)) >= layers
        (left if beyond or name.endswith("rotary_emb.inv_freq") else kept).append(name)
    cuts = {name: _cuts(checkpoint, name, parts) for name in kept}
    if heads % parts:
        raise UsageError(
            f"{option('parts', parts)}: {heads} attention heads cannot be shared evenly; take a divisor of {heads}"
        )
    contents: list[list[FileTensor]] = [[] for _ in range(parts)]
    places: dict[str, list[_Place]] = {}
    for name, found in cuts.items():
        tensor = _file_tensor(checkpoint, name)
        places[name] = found
        for place in found:
            contents[place.file].append(FileTensor(place.name, _cut_shape(tensor.shape, place.cut), tensor.dtype))
    files = [PlannedFile(NATIVE_PART.format(part=part, parts=parts), found) for part, found in enumerate(contents)]
    return _job(checkpoint, watch, files, places), left


def _cuts(checkpoint: Checkpoint, name: str, parts: int) -> list[_Place]:
    theirs, placement = native_name(name)
    if placement == "copies":
        return [_Place(part, theirs) for part in range(parts)]
    if placement == "one part":
        return [_Place(_part_of_expert(checkpoint, name, parts), theirs)]
    length = checkpoint.info(name).shape[placement]
    _check_divides(checkpoint, name, placement, parts)
    step = length // parts
    return [_Place(part, theirs, (placement, part * step, (part + 1) * step)) for part in range(parts)]


def _part_of_expert(checkpoint: Checkpoint, name: str, parts: int) -> int:
    experts = int(checkpoint.config["n_routed_experts"])
    if experts % parts:
        raise UsageError(
            f"{option('parts', parts)}: {experts} experts cannot be shared evenly; take a divisor of {experts}"
        )
    number = re.search(r"\.experts\.(\d+)\.", name)
    assert number is not None
    return int(number.group(1)) * parts // experts


def _check_divides(checkpoint: Checkpoint, name: str, axis: Placement, parts: int) -> None:
    assert isinstance(axis, int)
    length = checkpoint.info(name).shape[axis]
    if length % parts:
        raise UsageError(
            f"{option('parts', parts)}: {name} has {length} {'columns' if axis else 'rows'}, which cannot be shared "
            f"evenly; take a divisor of {length}"
        )
    if checkpoint.quantized(name) and parts > 1 and (length // parts) % _BLOCK:
        raise UsageError(
            f"{option('parts', parts)}: each would have {length // parts} {'columns' if axis else 'rows'} of {name}, "
            f"and cut through its FP8 blocks of {_BLOCK}; take fewer parts"
        )


def refuse_unsaid_formats(checkpoint: Checkpoint) -> None:
    """FormatError where the weights are in a form that DeepSeek's native layout does not know."""
    dtype = str(checkpoint.config.get("dtype") or "bfloat16")
    if dtype != "bfloat16":
        raise FormatError(f"SOURCE is in {dtype}; DeepSeek's native layout holds bfloat16, or FP8 in blocks of 128×128")
    for spec in checkpoint.layers:
        scheme = checkpoint.scheme(spec.o)
        if scheme is not None and (scheme.format, scheme.block) != ("float8", (_BLOCK, _BLOCK)):
            raise FormatError(f"{spec.o} is not in FP8 blocks of 128×128, the only codes of DeepSeek's native layout")


def _job(checkpoint: Checkpoint, watch: Watch, files: Sequence[PlannedFile], places: Mapping[str, list[_Place]]) -> Job:
    buffers = Buffers()
    units = tuple(
        Unit(
            key=name if len(found) == 1 else f"{name}, part {place.file}",
            files=(place.file,),
            memory=2 * _file_tensor(checkpoint, name).nbytes,
            load=functools.partial(_load, checkpoint, watch, files, name, place, buffers),
        )
        for name, found in places.items()
        for place in found
    )
    plan = fingerprint(
        files=[[file.name, hashlib.sha256(file.header).hexdigest()] for file in files],
        source=[watch.origin, watch.stamps],
    )
    largest = max(_file_tensor(checkpoint, name).nbytes for name in places)
    return Job(tuple(files), units, plan, largest, noun="tensors or parts of them", release=buffers.release)


def _load(
    checkpoint: Checkpoint, watch: Watch, files: Sequence[PlannedFile], name: str, place: _Place, buffers: Buffers
) -> Loaded:
    lease = buffers.lease()
    tensor = checkpoint.read(name, lease)
    watch.check([name])
    planned = _file_tensor(checkpoint, name)
    if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
        raise FormatError(f"{name} is stored as {list(tensor.shape)}, which is not its own shape; it cannot be moved")
    make = functools.partial(_make, tensor, place, files[place.file].starts[place.name])
    return Loaded([make], lambda known: {}, release=lease.release)


def _make(tensor: torch.Tensor, place: _Place, start: int) -> Made:
    if place.cut is not None:
        axis, begin, end = place.cut
        tensor = tensor.narrow(axis, begin, end - begin)
    return Made([Block(place.file, start, tensor)])


def _cut_shape(shape: tuple[int, ...], cut: tuple[int, int, int] | None) -> tuple[int, ...]:
    if cut is None:
        return shape
    axis, begin, end = cut
    return (*shape[:axis], end - begin, *shape[axis + 1 :])


def _file_tensor(checkpoint: Checkpoint, name: str) -> FileTensor:
    info = checkpoint.info(name)
    return FileTensor(name, info.shape, info.dtype)


def _order(name: str) -> list[tuple[int, str]]:
    """Sorts names with their numbers as numbers."""
    return [(int(step), "") if step.isdigit() else (-1, step) for step in name.split(".")]
