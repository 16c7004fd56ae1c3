"""Real launches of several processes: torchrun and accelerate."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rank_jobs import JOB, LAYERS, convert_alone, make_source
from snapshots import snapshot

from mla_convert.conversion import convert
from mla_convert.storage import AbsorbedCheckpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_source(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def whole(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return convert_alone(source, tmp_path_factory.mktemp("whole"))


@contextlib.contextmanager
def free_environment() -> Iterator[dict[str, str]]:
    """The environment without what a launch would set, and one thread each."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    yield {key: value for key, value in os.environ.items() if key not in names} | {"OMP_NUM_THREADS": "1"}


LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node=2",
    # With --cpu it would start one process, whatever it is asked for; these here never touch the GPUs of the option.
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no "
    "--dynamo_backend=no --main_process_port=0",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_real_launches(source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], launcher: str) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        *LAUNCHERS[launcher].split(),
        "-m",
        "mla_convert",
        "convert",
        str(source),
        str(out),
    ]
    with free_environment() as environment:
        done = subprocess.run([*command, "--json", "-"], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == LAYERS  # one report, of rank 0
    one = tmp_path / "one"
    convert(source, one)
    assert snapshot(out) == snapshot(one)
    AbsorbedCheckpoint.open(out)


SHARED = """
import pathlib, sys
from mla_convert import sidecar
from mla_convert.conversion import convert
from mla_convert.ranks import launched
source, out, shard_bytes, noted = sys.argv[1:]
world, read = launched(), sidecar.read_operands
def reading(checkpoint, layer, *rest):
    with open(f"{noted}/{world.rank}", "a") as file:
        print(layer.spec.index, file=file)
    return read(checkpoint, layer, *rest)
sidecar.read_operands = reading
convert(source, out, form="factored", max_shard_bytes=int(shard_bytes), world=world)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_a_real_launch_share_the_layers(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], launcher: str
) -> None:
    """Of three files the first two ranks get one each, and one of them the third."""
    script, noted = tmp_path / "shared.py", tmp_path / "noted"
    script.write_text(SHARED)
    noted.mkdir()
    given = map(str, (script, source, tmp_path / "out", JOB["max_shard_bytes"], noted))
    with free_environment() as environment:
        command = [sys.executable, "-m", *LAUNCHERS[launcher].split(), *given]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = {file.name: set(map(int, file.read_text().split())) for file in noted.iterdir()}
    assert set(read) == {"0", "1"} and {len(layers) for layers in read.values()} == {2, 4}
    assert sorted([*read["0"], *read["1"]]) == list(range(LAYERS))
    assert snapshot(tmp_path / "out") == whole
