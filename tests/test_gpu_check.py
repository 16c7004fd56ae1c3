"""The check that is run on a GPU, dry: its file, and its smallest form in Triton's interpreter."""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import decode_cases
import interpreter  # noqa: F401  # before Triton
import pytest
import torch

from mla_convert.kernels.reference import absorbed_decode_reference

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu.results

    return gpu.results


def fails() -> Any:
    raise RuntimeError("out of resource")


def too_large() -> Any:
    raise MemoryError("takes 1 byte")


def square(number: int) -> dict[str, int]:
    return {"square": number * number}


def test_what_is_there_is_not_measured_again(results: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = results.Results(path, time.monotonic() + 60)
    first.begin({"device": "one"})
    first.measure("works", lambda: square(2))
    first.measure("fails", fails)
    first.measure("large", too_large)
    again = results.Results(path, time.monotonic() + 60)
    again.begin({"device": "one"})
    again.measure("works", fails)
    again.measure("large", fails)
    again.measure("fails", lambda: square(3))
    held = json.loads(path.read_text())["entries"]
    assert held["works"]["square"] == 4 and held["fails"]["square"] == 9 and held["large"]["left_out"] == "takes 1 byte"


def test_nothing_starts_past_the_deadline(results: ModuleType, tmp_path: Path) -> None:
    late = results.Results(tmp_path / "out.json", time.monotonic() - 1)
    late.measure("one", fails)
    late.measure_apart(square, [("two", 2)], workers=4)
    assert late.left_out == ["one", "two"] and not late.entries


def test_figures_of_another_machine_are_not_mixed(results: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results.Results(path, 0.0).begin({"device": "one"})
    with pytest.raises(results.OutOfStep, match=r"device one \(now two\); name another file"):
        results.Results(path, 0.0).begin({"device": "two"})
    path.write_text('{"entries": [')
    with pytest.raises(results.OutOfStep, match="not a file of this check"):
        results.Results(path, 0.0)


def test_inputs_rotate_through_more_than_a_cache_holds(results: ModuleType) -> None:
    """The smallest problem that is timed, a batch of one with 1,024 tokens, as well as one that is larger than that."""
    import gpu.timing

    for size in (1, 1024 * 576 * 2, gpu.timing.ROTATED_BYTES, 10 * gpu.timing.ROTATED_BYTES):
        assert gpu.timing.rotations(size) * size > gpu.timing.ROTATED_BYTES


@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
def test_a_wrong_result_is_judged_wrong(results: ModuleType, paged: bool) -> None:
    """However little is known of what lies in memory that no sequence uses."""
    from gpu.correctness import judged

    args = decode_cases.flashmla_problem(paged)
    out, lse = absorbed_decode_reference(args, torch.float32)
    found = judged("right", args, out, lse)
    assert 0 < found["error"] <= found["allowed"] < 1e-4 and found["lse_allowed"] < 1e-4
    for wrong in ((out * 1.001, lse), (out, lse + 1e-3), (out * torch.nan, lse), (out, lse * -torch.inf)):
        with pytest.raises(AssertionError):
            judged("wrong", args, *wrong)


def lose(number: int) -> dict[str, int]:
    """Stands for a kernel that reads outside its memory, at the third job."""
    if number == 2:
        raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered")
    return square(number)


def test_a_lost_context_ends_the_cases(results: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The case that lost it is named; those that waited are left out, not failed."""
    monkeypatch.setattr(results, "_LOST", [])
    monkeypatch.setattr(results, "_ACCELERATOR_ERROR", getattr(torch, "AcceleratorError", RuntimeError))
    futures: dict[Any, str] = {}
    for number in (0, 1, 2, 3, 4):
        future: Any = concurrent.futures.Future()
        futures[future] = f"case {number}"
        try:
            future.set_result(results.carefully(lose, number))
        except Exception as error:
            future.set_exception(error)
    names = [type(future.exception()).__name__ for future in futures]
    assert names == ["NoneType", "NoneType", "DeviceLost", "Skipped", "Skipped"]
    found = results.Results(tmp_path / "out.json", time.monotonic() + 60)
    found._collect(dict(list(futures.items())[2:]))
    assert "illegal memory access" in found.lost
    assert [name for name, entry in found.entries.items() if results.failed(entry)] in ([], ["case 2"])
    found.measure("next", lambda: square(1))
    assert found.left_out == ["next"]


def test_a_process_that_ends_is_no_failure_of_what_waited(results: ModuleType, tmp_path: Path) -> None:
    future: Any = concurrent.futures.Future()
    future.set_exception(concurrent.futures.process.BrokenProcessPool("ended abruptly"))
    found = results.Results(tmp_path / "out.json", time.monotonic() + 60)
    found._collect({future: "case 1"})
    assert not found.entries and "ended abruptly" in found.lost


def test_tiles_are_timed_by_replay(results: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import timing, variants

    asked: list[bool] = []
    monkeypatch.setattr(timing, "seconds", lambda work, *, graph=False: asked.append(graph) or 1.0)
    shape = variants.Shape(3, 2, 70)
    found = variants.measure(shape, variants.chosen_for(shape), {})
    assert asked == [True] and found["seconds"] == 1.0


def test_a_run_goes_on_where_less_memory_is_reported(results: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same GPU under another driver: nothing that is measured depends on it."""
    from gpu import setting

    described = []
    for memory in (1, 2):
        properties = types.SimpleNamespace(name="one", multi_processor_count=132, total_memory=memory, L2_cache_size=3)
        monkeypatch.setattr(setting, "CPU", False)
        monkeypatch.setattr(setting, "arch", lambda: "sm_90")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        described.append(setting.machine())
    assert described[0] == described[1] and described[0]["device"] == "one"


def dry_run(out: Path, *options: str) -> str:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--cpu", "--cases", "3", "--out", str(out), *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=out.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path: Path) -> None:
    """Every entry there is, measured and none planted."""
    out = tmp_path / "out.json"
    dry_run(out, "--cases", "1")
    written = json.loads(out.read_text())
    assert written["summary"]["failed"] == written["summary"]["tiles_that_do_not_run"] == []
    assert written["summary"]["left_out"] == [] and written["summary"]["device_lost"] is None
    kinds = {re.split(r"[ :=]", name)[0] for name in written["entries"]}
    assert {"case", "bit", "FlashMLA", "merged", "decode", "transformers", "tile", "projections", "ceilings"} <= kinds
    assert len(written["entries"]) > 20


@pytest.mark.slow
def test_the_dry_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Without time everything is left out, by name; with all but a little planted, that little is measured."""
    out = tmp_path / "out.json"
    assert "left out for time" in dry_run(out, "--budget", "0")
    written = json.loads(out.read_text())
    left = written["summary"]["left_out"]
    assert set(written["entries"]) == {"machine"} and left[0] == "case 000" and len(left) > 20
    few = {"case 000", "case 001", "case 002", "decode heads=3 batch=2 history=70 new=1"}
    few |= set([name for name in left if name.startswith("tile heads=3 batch=2")][:2])
    few |= set(left[left.index("bit equality") : left.index("projections correct")])
    written["entries"] |= {name: {"planted": True} for name in left if name not in few}
    out.write_text(json.dumps(written))
    dry_run(out, "--workers", "2")
    ended = json.loads(out.read_text())
    assert {name for name, entry in ended["entries"].items() if "planted" not in entry} == few | {"machine"}
    assert ended["summary"]["left_out"] == ended["summary"]["failed"] == []
    assert ended["summary"]["cases"] == 3 and 0 < ended["summary"]["worst_share_of_allowed"] <= 1
    decode = ended["entries"]["decode heads=3 batch=2 history=70 new=1"]
    assert decode["sdpa"]["relative_difference"] < 1e-5 and decode["times_faster_than_sdpa"] > 0
    (advice,) = ended["summary"]["tiles"].values()
    assert advice["tiles"] == 2 and advice["times_faster"] >= 1
