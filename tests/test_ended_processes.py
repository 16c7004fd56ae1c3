"""Conversions in processes of their own that are killed or interrupted, as a shell does it."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest
from interruptions import count_loads, noted
from snapshots import snapshot

from mla_convert import destination
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import SidecarError
from mla_convert.storage import AbsorbedCheckpoint

KILLED = """
import os, signal, sys
from mla_convert import disk
from mla_convert.conversion import convert
move = disk.move
def stop(source, target):
    if target.name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    move(source, target)
disk.move = stop
convert(sys.argv[1], sys.argv[2], max_shard_bytes=150_000)
"""


def test_kill_9_between_two_renames(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    script = [sys.executable, "-c", KILLED, str(example_path), str(out), "mla_absorbed.safetensors.index.json"]
    killed = subprocess.run(script, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {file.name for file in out.iterdir()}
    assert "mla_absorbed-00001-of-00002.safetensors" in left and "mla_manifest.json" not in left
    with pytest.raises(SidecarError, match="interrupted conversion"):
        AbsorbedCheckpoint.open(out)
    convert(example_path, out)  # in one shard this time: the two renamed ones have to go
    assert {file.name for file in out.glob("*.safetensors")} == {"mla_absorbed-00001-of-00001.safetensors"}
    AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(example_path))


SLOW = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from mla_convert import sidecar, work
from mla_convert.cli import app
read, end, ending = sidecar.read_operands, work._Pool.stop, threading.Event()
def reading(checkpoint, layer, *rest):
    if layer.spec.index == 2:
        print("here", flush=True)
        ending.wait(60)  # until the signal has come, however long that takes on a busy machine
    return read(checkpoint, layer, *rest)
def stop(pool):
    ending.set()
    end(pool)
sidecar.read_operands, work._Pool.stop = reading, stop
sys.argv[0] = "mla-convert"
app()
"""


def test_ctrl_c_on_the_command_line(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT as a terminal sends it: exit code 130, one line, and what was done is done once."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, "convert", str(example_path), str(out), "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        while noted(out) < 2:  # the layers before it
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    line = f"error: interrupted: what is done is kept in {out / destination.INCOMPLETE}; the same command goes on from"
    assert errors.startswith(line) and errors.count("\n") == 1
    assert not (out / destination.MANIFEST).exists()
    before = noted(out)
    loads = count_loads(monkeypatch)
    convert(example_path, out)
    assert len(loads) == 4 - before <= 2
    convert(example_path, tmp_path / "one")
    assert snapshot(out) == snapshot(tmp_path / "one")
