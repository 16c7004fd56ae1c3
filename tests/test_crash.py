"""kill -9 at random moments: the next call finishes, with the bytes of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from snapshots import snapshot
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert.conversion import convert

LAYERS = 12
MOMENTS = 40
#: Starts the interpreter once and a process for each run, so that a moment falls into the run and not into imports.
RUNS = """
import os, sys
import torch
from mla_convert.conversion import convert
torch.set_num_threads(1)
source, out, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
for line in sys.stdin:
    child = os.fork()
    if not child:
        convert(source, out, max_shard_bytes=shard_bytes, workers=1)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: pathlib.Path) -> None:
    config = config_v3(num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS, hidden_size=80, num_attention_heads=4)
    tensors = {name: t for layer in range(LAYERS) for name, t in attention_weights(config, layer).items()}
    source = write_checkpoint(tmp_path / "source", config, tensors)
    shard_bytes = 30_000
    started = time.perf_counter()
    convert(source, tmp_path / "whole", max_shard_bytes=shard_bytes, workers=1)
    length = time.perf_counter() - started
    whole = snapshot(tmp_path / "whole")
    assert len([name for name in whole if name.endswith(".safetensors")]) > 2
    out, moments = tmp_path / "out", random.Random(20260730)
    interrupted = 0
    command = [sys.executable, "-c", RUNS, str(source), str(out), str(shard_bytes)]
    with subprocess.Popen(command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runs:
        assert runs.stdin is not None and runs.stdout is not None
        for number in range(MOMENTS):
            runs.stdin.write("run\n")
            runs.stdin.flush()
            child = int(runs.stdout.readline())
            time.sleep(moments.uniform(0, 1.2 * length))
            with contextlib.suppress(ProcessLookupError):  # the run was quicker
                os.kill(child, signal.SIGKILL)
            assert runs.stdout.readline() == "ended\n"
            complete = (out / "mla_manifest.json").exists()
            interrupted += not complete
            # Every other time the killed run is itself one that goes on from a killed run.
            if not complete and number % 2:
                convert(source, out, max_shard_bytes=shard_bytes)
                complete = True
            if complete:
                found = {name: data for name, data in snapshot(out).items() if not name.startswith(".mla")}
                assert found == whole, number
                for file in sorted(out.rglob("*"), reverse=True):
                    file.rmdir() if file.is_dir() else file.unlink()
        runs.stdin.close()
    assert interrupted > MOMENTS // 4
