"""What goes wrong on the hub: one clear error for each, and patience where it helps."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from hub_client import NAME
from hub_server import Hub

from mla_convert import hub_ranges
from mla_convert.checkpoint import Checkpoint


class Clock:
    """Time that passes only where somebody waits; the server is busy until ``ready``."""

    def __init__(self, hub: Hub, headers: dict[str, str], ready: float) -> None:
        self.now, self._hub, self._ready = 0.0, hub, ready
        hub.busy, hub.faults, hub.api_faults = headers, [503] * 99, [429] * 99
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        if self.now >= self._ready:
            self._hub.faults, self._hub.api_faults = [], []

    def time(self) -> float:
        return self.now


WAITS = {
    "seconds": ({"Retry-After": "1"}, 1.0),
    "minutes": ({"Retry-After": "240"}, 240.0),
    "a date": ({"Retry-After": "Thu, 01 Jan 1970 00:01:30 GMT"}, 90.0),
    "the hub's window": ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 55.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_busy_server_is_given_the_time_that_it_asks_for(
    hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The client's own waits (here milliseconds) would be over long before."""
    headers, seconds = WAITS[name]
    clock = Clock(hub, headers, seconds)
    monkeypatch.setattr(hub_ranges, "time", clock)
    checkpoint = Checkpoint.open(NAME)  # the list of files
    assert clock.waits == [seconds]
    clock = Clock(hub, headers, seconds)
    monkeypatch.setattr(hub_ranges, "time", clock)
    checkpoint.read(checkpoint.layers[0].kv_b)  # a range
    assert clock.waits == [seconds]


def test_a_server_that_asks_for_too_much_patience(
    hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    clock = Clock(hub, {"Retry-After": "7200"}, 7200)
    hub.api_faults = []
    monkeypatch.setattr(hub_ranges, "time", clock)
    result = invoke("convert", NAME, tmp_path / "out")
    assert result.exit_code == 2 and "try again in 7200 s, as the hub asks" in result.stderr
    assert clock.waits == [] and result.stderr.count("\n") == 1


ERRORS: dict[str, tuple[str, Callable[[Hub], object], tuple[str, ...]]] = {
    "a typo": (
        "org/exmaple",
        lambda hub: None,
        ("there is no folder org/exmaple, and no repository", "check the name"),
    ),
    "gated": (NAME, lambda hub: setattr(hub, "token", "x"), ("accept its conditions", "hf auth login", "HF_TOKEN")),
    "a token that is refused": (
        NAME,
        lambda hub: hub.api_faults.append(401),
        ("the hub refuses org/example to the token that is set", "hf auth login", "HF_TOKEN"),
    ),
    "a token that is refused for files": (
        NAME,
        lambda hub: hub.faults.append(401),
        ("the hub refuses org/example to the token that is set", "hf auth login", "HF_TOKEN"),
    ),
    "no such revision": (f"{NAME}@v9", lambda hub: None, ("has no revision 'v9'", "branch, a tag or a whole commit")),
    "always busy": (NAME, lambda hub: hub.api_faults.extend([503] * 9), ("the hub cannot be reached (", "503")),
    "broken off for good": (
        NAME,
        lambda hub: hub.faults.extend([503] * 99),
        ("cannot be read from the hub", "what was read so far is kept"),
    ),
    "ranges ignored": (NAME, lambda hub: hub.faults.append("whole"), ("status 200", "would have to be read whole")),
    "no config": (
        NAME,
        lambda hub: (hub.repositories[NAME] / "config.json").unlink(),
        ("org/example@0123456789abcdef0123456789abcdef01234567 has no config.json",),
    ),
    "a missing shard": (
        NAME,
        lambda hub: (hub.repositories[NAME] / "model-00002-of-00003.safetensors").unlink(),
        ("lacks model-00002-of-00003.safetensors",),
    ),
    "GGUF alone": (
        NAME,
        lambda hub: [
            file.rename(file.with_suffix(".gguf")) if file.suffix == ".safetensors" else file.unlink()
            for file in hub.repositories[NAME].iterdir()
        ],
        ("holds GGUF files", "base_model"),
    ),
    "cut short": (
        NAME,
        lambda hub: os.truncate(hub.repositories[NAME] / "model-00002-of-00003.safetensors", 50_000),
        ("model-00002-of-00003.safetensors is cut short: 50000 bytes",),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_one_clear_error(hub: Hub, tmp_path: pathlib.Path, invoke: Callable[..., Any], name: str) -> None:
    source, spoil, words = ERRORS[name]
    spoil(hub)
    result = invoke("convert", source, tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk(
    hub: Hub, tmp_path: pathlib.Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_ranges, "_go_on", full)
    result = invoke("convert", NAME, tmp_path / "out")
    assert result.exit_code == 2 and "the disk is full" in result.stderr and "HF_HOME" in result.stderr
    assert result.stderr.count("\n") == 1
