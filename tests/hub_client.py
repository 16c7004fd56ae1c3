"""The hub client turned to a server on this machine that has the example, and what tests of it compare."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import huggingface_hub
import pytest
from hub_server import Hub, serve
from huggingface_hub import constants

from mla_convert import hub as hub_module
from mla_convert import hub_ranges
from mla_convert.checkpoint import Checkpoint

NAME = "org/example"


def turn_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the endpoint as HF_ENDPOINT sets it when the hub client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextlib.contextmanager
def serving(example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with the example, the hub client turned to it, and empty caches."""
    source = tmp_path / "served"
    shutil.copytree(example_path, source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# The original's own card\n")
    with serve(example=source) as server:
        turn_to(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub_ranges, "WAIT", 0.001)
        monkeypatch.chdir(tmp_path)
        huggingface_hub.close_session()
        hub_module._listing.cache_clear()
        yield server
        huggingface_hub.close_session()
        hub_module._listing.cache_clear()


def needed_bytes(folder: pathlib.Path, names: set[str]) -> int:
    """What has to be read: config, index and card, the headers of all shards, and the tensors."""
    checkpoint = Checkpoint.open(folder)
    shards = list(folder.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards)
    texts = sum((folder / name).stat().st_size for name in ("config.json", "model.safetensors.index.json", "README.md"))
    return headers + texts + sum(map(checkpoint.stored_bytes, names))


def assert_same_files(a: pathlib.Path, b: pathlib.Path) -> None:
    names = sorted(file.name for file in a.iterdir())
    assert names == sorted(file.name for file in b.iterdir()) and names
    for name in names:
        if name != "README.md":
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    card = (a / "README.md").read_text()  # a folder does not say which repository it came from
    assert f"base_model: {NAME}\nlicense: mit\n" in card and f"weights of {NAME}" in card
