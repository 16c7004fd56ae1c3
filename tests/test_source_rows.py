"""Rows of a source tensor that are read as they are needed: the values, the hash, and files that turn out wrong."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from snapshots import snapshot
from spoiling import edit
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert import sidecar
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.digest import tensor_digest
from mla_convert.errors import CheckpointError, FormatError, MLAConvertError
from mla_convert.memory import Scratch
from mla_convert.recipe import plan_layers
from mla_convert.source_rows import HeldRows, ReadRows
from mla_convert.storage import AbsorbedCheckpoint

W_O, Q_B = (f"model.layers.0.self_attn.{name}.weight" for name in ("o_proj", "q_b_proj"))
CPU = torch.device("cpu")
CONFIG = config_v3(dtype="bfloat16")
PART = "model0-mp1.safetensors"


def write(folder: pathlib.Path, **spoiled: float) -> Checkpoint:
    """A small checkpoint; ``spoiled`` values stand in row 7 of W_O or of the query's projection."""
    weights = attention_weights(CONFIG, dtype=torch.bfloat16)
    for name, value in spoiled.items():
        weights[f"model.layers.0.self_attn.{name}.weight"][7, 3] = value
    return Checkpoint.open(write_checkpoint(folder, CONFIG, weights))


def by_rows(checkpoint: Checkpoint, scratch: Scratch | None = None) -> ReadRows:
    piece = checkpoint.piece(W_O)
    assert piece is not None
    return ReadRows(checkpoint, W_O, piece, CPU, scratch or Scratch())


def cuts(rows: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_rows_are_those_of_the_whole(tmp_path: pathlib.Path, step: int) -> None:
    checkpoint = write(tmp_path)
    whole = checkpoint.read(W_O)
    for rows in (by_rows(checkpoint), HeldRows(whole)):
        for start, stop in cuts(len(whole), step):
            with rows.take(start, stop) as (found, largest):
                assert torch.equal(found, whole[start:stop]) and found.dtype == whole.dtype
                assert largest == whole[start:stop].abs().max()


def test_the_hash_in_every_order(tmp_path: pathlib.Path) -> None:
    checkpoint = write(tmp_path)
    expected = tensor_digest(checkpoint.read(W_O))
    ranges = cuts(len(checkpoint.read(W_O)), -(-len(checkpoint.read(W_O)) // 4))
    assert len(ranges) == 4
    for order in itertools.permutations(ranges):
        one_by_one, at_once = by_rows(checkpoint), by_rows(checkpoint)
        with ExitStack() as open_at_once:
            for start, stop in order:
                with one_by_one.take(start, stop):
                    pass
                open_at_once.enter_context(at_once.take(start, stop))
        assert one_by_one.sha256() == at_once.sha256() == expected, order


@pytest.mark.parametrize("taken", [[], [(0, 5)], [(9, 13)], [(0, 16), (0, 16)], [(4, 8), (0, 4), (2, 6)]])
def test_the_hash_where_rows_are_taken_twice_or_not_at_all(
    tmp_path: pathlib.Path, taken: list[tuple[int, int]]
) -> None:
    checkpoint = write(tmp_path)
    rows = by_rows(checkpoint)
    for start, stop in taken:
        with rows.take(start, stop):
            pass
    assert rows.sha256() == tensor_digest(checkpoint.read(W_O))


def test_many_threads(tmp_path: pathlib.Path) -> None:
    checkpoint = write(tmp_path)
    whole, scratch = checkpoint.read(W_O), Scratch()

    def use(rows: ReadRows, start: int) -> bool:
        with rows.take(start, start + 1) as (found, _):
            return torch.equal(found, whole[start : start + 1])

    with ThreadPoolExecutor(8) as pool:
        for seed in range(20):
            rows = by_rows(checkpoint, scratch)
            order = list(range(len(whole)))
            random.Random(seed).shuffle(order)
            assert all(pool.map(lambda start, rows=rows: use(rows, start), order))  # type: ignore[misc]
            assert rows.sha256() == tensor_digest(whole)


class Counted(Scratch):
    """Memory of which one knows how much is lent out."""

    lent = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
        memory, give = super().take(shape, dtype)
        self.lent += 1

        def giving() -> None:
            self.lent -= 1
            give()

        return memory, giving


def test_memory_of_what_has_waited_is_given_back(tmp_path: pathlib.Path) -> None:
    scratch = Counted()
    rows = by_rows(write(tmp_path), scratch)
    for start, lent in [(2, 1), (3, 2), (1, 3), (0, 0), (4, 0)]:
        with rows.take(start, start + 1):
            pass
        assert scratch.lent == lent


def test_memory_is_used_again(tmp_path: pathlib.Path) -> None:
    rows, places = by_rows(write(tmp_path)), set()
    for start in range(8):
        with rows.take(start, start + 1) as (found, _):
            places.add(found.data_ptr())
    assert len(places) == 1


def test_which_tensors_are_read_by_rows(tmp_path: pathlib.Path) -> None:
    """Not those of which several copies, parts or codes have to be seen together."""
    checkpoint = write(tmp_path / "hf")
    convert(checkpoint, tmp_path / "native", target="native", parts=2)
    native = Checkpoint.open(tmp_path / "native")
    assert all(checkpoint.piece(name) is not None for name in (W_O, Q_B))
    assert all(native.piece(name) is None for name in (W_O, Q_B))


@pytest.mark.parametrize(("ours", "theirs"), [("o_proj", "wo"), ("q_b_proj", "wq_b")])
def test_a_native_part_says_the_checkpoints_name(tmp_path: pathlib.Path, ours: str, theirs: str) -> None:
    """One part is read by rows, under the names that it has inside."""
    convert(write(tmp_path / "hf"), tmp_path / "native", target="native", parts=1)
    edit(tmp_path / "native", lambda tensors: tensors[f"layers.0.attn.{theirs}.weight"][7, 3].fill_(math.nan), PART)
    native = Checkpoint.open(tmp_path / "native")
    assert native.piece(W_O) is not None
    with pytest.raises(FormatError, match=rf"layers.0.self_attn.{ours}.weight has 1 NaN or infinite values"):
        convert(native, tmp_path / "out", form="fused")


@pytest.mark.parametrize("name", ["o_proj", "q_b_proj"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(tmp_path: pathlib.Path, name: str, value: float) -> None:
    checkpoint = write(tmp_path / "source", **{name: value})
    with pytest.raises(FormatError, match=rf"{name}.weight has 1 NaN or infinite values \(of \d+\) in bfloat16"):
        convert(checkpoint, tmp_path / "out", form="fused")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_cut_or_changed_between_its_rows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    checkpoint = write(source)
    (file,) = source.glob("*.safetensors")
    read, size = sidecar.read_operands, file.stat().st_size

    def pipe() -> None:  # whoever opens it waits for somebody who writes
        file.unlink()
        os.mkfifo(file)

    def then(change):  # type: ignore[no-untyped-def]
        def reading(*arguments):  # type: ignore[no-untyped-def]
            operands = read(*arguments)
            change()
            return operands

        monkeypatch.setattr(sidecar, "read_operands", reading)

    for change in (lambda: os.truncate(file, 1000), file.unlink, lambda: write(source, o_proj=math.nan), pipe):
        then(change)
        with pytest.raises(MLAConvertError, match="changed while it was read"):
            convert(source, tmp_path / "out", form="fused")
        file.unlink(missing_ok=True)
        write(source)
    assert file.stat().st_size == size
    operands = read(checkpoint, plan_layers(checkpoint, {"qk": "fused", "vo": "fused"}, None)[0], CPU)
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match=f"ends inside {W_O}: it was cut short"):
        assert operands.o is not None
        operands.o.take(0, 4).__enter__()
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_while_blocks_are_made(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, make = tmp_path / "source", sidecar.make_block
    write(source)
    (file,) = source.glob("*.safetensors")

    def making(*arguments):  # type: ignore[no-untyped-def]
        os.utime(file)
        return make(*arguments)

    monkeypatch.setattr(sidecar, "make_block", making)
    noted = []
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(source, tmp_path / "out", form="fused", progress=lambda *done: noted.append(done))
    assert not noted  # nor is it in a journal, for another run to go on from
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("form", ["fused", "factored"])
def test_the_manifest_has_the_hashes(tmp_path: pathlib.Path, form: str, quantize: str | None) -> None:
    checkpoint = write(tmp_path / "source")
    convert(checkpoint, tmp_path / "out", form=form, quantize=quantize)
    made = AbsorbedCheckpoint.open(tmp_path / "out").manifest.source.tensors
    assert (W_O in made) == (Q_B in made) == (form == "fused")
    assert {name: tensor.sha256 for name, tensor in made.items()} == {
        name: tensor_digest(checkpoint.read(name)) for name in made
    }


def test_the_bytes_do_not_depend_on_how_rows_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "by rows", form="fused")
    monkeypatch.setattr(Checkpoint, "piece", lambda *_: None)
    convert(tmp_path / "source", tmp_path / "whole", form="fused", workers=1)
    assert snapshot(tmp_path / "by rows") == snapshot(tmp_path / "whole")
