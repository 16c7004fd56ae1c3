"""Memory that is used again: never more of it than was needed at once, and none of it when the work has ended."""

from __future__ import annotations

import pathlib
import random
import weakref
from typing import Any

import pytest
from torch import Tensor

from mla_convert import conversion, memory
from mla_convert.conversion import convert
from mla_convert.gathering import PAGE
from mla_convert.memory import Buffers, Scratch, new_pages


def alive(seen: list[weakref.ref[Tensor]]) -> int:
    return sum(len(tensor) for ref in seen if (tensor := ref()) is not None)


def test_new_pages() -> None:
    for nbytes in (0, 1, 5000, 1 << 22):
        memory = new_pages(nbytes)
        assert len(memory) == nbytes and memory.data_ptr() % PAGE == 0
        memory.fill_(7)
    with pytest.raises(MemoryError, match="4611686018427387904 bytes: "):
        new_pages(1 << 62)


def test_no_more_is_held_than_was_in_use_at_once() -> None:
    buffers, seen, leases = Buffers(), [], []
    choose, in_use, most, reused = random.Random(0), 0, 0, 0
    for _ in range(300):
        if choose.random() < 0.6 or not leases:
            sizes = [choose.choice((100, 200, 300)) for _ in range(2)]
            lease = buffers.lease()
            taken = [lease(size) for size in sizes]
            reused += sum(any(ref() is buffer for ref in seen) for buffer in taken)
            seen += [weakref.ref(buffer) for buffer in taken]
            leases.append((lease, sum(sizes)))
            in_use += sum(sizes)
        else:
            lease, nbytes = leases.pop(choose.randrange(len(leases)))
            taken = []
            lease.release()
            in_use -= nbytes
        most = max(most, in_use)
        held = {id(buffer): len(buffer) for ref in seen if (buffer := ref()) is not None}
        assert sum(held.values()) <= most
        buffer = None
    assert reused > 50
    for lease, _ in leases:
        lease.release()
    assert alive(seen) > 0
    taken = []
    buffers.release()
    assert alive(seen) == 0


@pytest.mark.parametrize("target", ["sidecar", "hf"])
def test_nothing_is_held_when_the_units_have_ended(
    example_path: pathlib.Path, tmp_path: pathlib.Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after, such as a model that is run to measure what codes cost, has the machine for itself."""
    seen: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    take, finish = memory.Buffers.take, conversion._finish

    def taking(self: Buffers, nbytes: int) -> Tensor:
        buffer = take(self, nbytes)
        seen.append(weakref.ref(buffer))
        return buffer

    def finishing(*arguments: Any) -> Any:
        left.append(alive(seen))
        return finish(*arguments)

    monkeypatch.setattr(memory.Buffers, "take", taking)
    monkeypatch.setattr(conversion, "_finish", finishing)
    convert(example_path, tmp_path / "out", target=target)
    assert seen and left == [0]


def test_scratch_is_used_again_when_it_is_given_back() -> None:
    scratch = Scratch()
    first, release = scratch.take((4, 8), memory.torch.float32)
    beside, _ = scratch.take((4, 8), memory.torch.float32)
    assert first.shape == (4, 8) and first.data_ptr() != beside.data_ptr()
    release()
    again, _ = scratch.take((2, 8), memory.torch.bfloat16)
    assert again.shape == (2, 8) and again.data_ptr() == first.data_ptr()
