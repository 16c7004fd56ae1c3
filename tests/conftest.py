"""Shared fixtures: the example checkpoint in the forms in which DeepSeek checkpoints are found."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import typer.testing

ROOT = pathlib.Path(__file__).resolve().parent.parent
# From the repository root, the folder kernels would stand in for Hugging Face's package of that name.
sys.path[:] = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != ROOT]

import hub_client  # noqa: E402
import hub_server  # noqa: E402
import older  # noqa: E402  # only once the path is right
import variants  # noqa: E402

import mla_convert  # noqa: E402
from mla_convert.cli import app  # noqa: E402
from mla_convert.console import LOGGER  # noqa: E402
from mla_convert.patches.layer import AbsorbedLayer  # noqa: E402

older.accept_cache()

# The same examples in every run; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def example_path() -> pathlib.Path:
    """The trained example: deepseek_v3, bfloat16, three shards, YaRN with mscale_all_dim."""
    return pathlib.Path(mla_convert.__file__).parent / "example"


@pytest.fixture(scope="session")
def fp8_path(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The example in FP8 blocks of 128 × 128, some scales in other shards than their weights."""
    return variants.write_fp8(example_path, tmp_path_factory.mktemp("example-fp8"))


@pytest.fixture(scope="session")
def native_path(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The example in DeepSeek's own layout, two parts."""
    return variants.write_native(example_path, tmp_path_factory.mktemp("example-native"), parts=2)


@pytest.fixture
def hub(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hub_server.Hub]:
    """A hub on this machine with the example."""
    with hub_client.serving(example_path, tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def invoke() -> Iterator[Callable[..., Any]]:
    """Run the program in this process: (arguments) -> result with ``exit_code``, ``stdout`` and ``stderr``."""
    handlers, level = list(LOGGER.handlers), LOGGER.level
    yield lambda *arguments: typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of new tokens of each absorbed call, in order."""
    seen: list[int] = []
    attend = AbsorbedLayer.attend

    def counting(self: AbsorbedLayer, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return attend(self, query, *args, **kwargs)

    monkeypatch.setattr(AbsorbedLayer, "attend", counting)
    return seen
