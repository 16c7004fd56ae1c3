"""Products on another device than the host: formed there, of operands that are there, and stored as the host's are."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from pretended_device import DEVICE, Away, Pretending
from snapshots import snapshot

from mla_convert import work
from mla_convert.conversion import convert

PRODUCTS = {"aten::mm", "aten::bmm"}


def test_the_device_is_one() -> None:
    """What an accelerator refuses is refused, so that the test below can fail."""
    with Pretending():
        there = torch.ones(2, 2, device=DEVICE)
        assert isinstance(there, Away) and there.device == DEVICE
        assert isinstance(there @ torch.ones(2, 2).to(DEVICE), Away)
        with pytest.raises(AssertionError, match="two devices"):
            there @ torch.ones(2, 2)
        assert torch.equal((there + 1).cpu(), torch.full((2, 2), 2.0))
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantize": "int8"}], ids=str)
@pytest.mark.parametrize("form", ["fused", "factored"])
def test_products_are_formed_there(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    form: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert(example_path, tmp_path / "here", form=form, **options)
    there, here = set[str](), set[str]()
    guarded = work._Pool._guarded

    def on_the_device(pool: Any, *rest: Any) -> None:  # modes are of one thread
        with Pretending() as mode:
            guarded(pool, *rest)
        there.update(mode.done[True])
        here.update(mode.done[False])

    monkeypatch.setattr(work._Pool, "_guarded", on_the_device)
    with Pretending():
        convert(example_path, tmp_path / "there", form=form, device=DEVICE, **options)
    assert (PRODUCTS <= there) == (form == "fused") and not PRODUCTS & here
    assert snapshot(tmp_path / "there") == snapshot(tmp_path / "here")
