"""What is kept of the hub, after a machine that lost its power half way, or somebody, has left something else of it."""

from __future__ import annotations

import os
import pathlib
import re

import huggingface_hub
import pytest
from hub_client import NAME
from hub_server import COMMIT, Hub
from huggingface_hub import constants

from mla_convert import hub as hub_module
from mla_convert import hub_ranges
from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import CheckpointError

SHARD = "model-00001-of-00003.safetensors"


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a later process that may not ask the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    hub_module._listing.cache_clear()


@pytest.mark.parametrize("left", [0, 40, 120], ids="{} bytes of 100".format)
def test_a_kept_range_of_another_length_is_fetched_again(hub: Hub, left: int) -> None:
    whole = (hub.repositories[NAME] / SHARD).read_bytes()
    kept = hub_ranges.folder(NAME, COMMIT) / SHARD
    assert hub_ranges.span(NAME, COMMIT, SHARD, 8, 100, len(whole)) == whole[8:108]
    (kept / "8-100").write_bytes(bytes(left))
    hub.ranges.clear()
    assert hub_ranges.missing(NAME, COMMIT, SHARD, 8, 100) == 100
    for _ in range(2):
        assert hub_ranges.span(NAME, COMMIT, SHARD, 8, 100, len(whole)) == whole[8:108]
        assert hub_ranges.span(NAME, COMMIT, SHARD, 20, 60, len(whole)) == whole[20:80]
    assert hub.ranges == [(SHARD, 8, 100)] and hub_ranges.missing(NAME, COMMIT, SHARD, 8, 100) == 0


@pytest.mark.parametrize("text", [b"", b'{"config.json"', bytes(40), b"[]", b'{"config.json": "1"}', b"\xff"])
@pytest.mark.parametrize("name", ["listing.json", "main"])
def test_a_list_that_cannot_be_read_counts_as_none(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes
) -> None:
    """Offline that is said, with what to do; the next time online mends it."""
    layers = len(Checkpoint.open(NAME).layers)
    (hub_ranges.folder(NAME, COMMIT if name == "listing.json" else "") / name).write_bytes(text)
    with monkeypatch.context() as patch:
        offline(patch)
        with pytest.raises(CheckpointError, match=r"offline .*nothing of org/example at main was read before; go onl"):
            Checkpoint.open(NAME)
    hub_module._listing.cache_clear()
    assert len(Checkpoint.open(NAME).layers) == layers
    offline(monkeypatch)
    assert len(Checkpoint.open(NAME).layers) == layers


def test_what_is_kept_is_on_the_disk_before_it_has_its_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def noted_replace(here: pathlib.Path, there: pathlib.Path) -> None:
        if pathlib.Path(there).is_relative_to(constants.HF_ASSETS_CACHE):
            assert os.fspath(here) in events, there
            events.append(there.name)
        replace(here, there)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoint = Checkpoint.open(NAME)
    checkpoint.read(checkpoint.layers[0].kv_b)
    assert {"listing.json", "main"} < set(events) and any(re.fullmatch(r"\d+-\d+", event) for event in events)
