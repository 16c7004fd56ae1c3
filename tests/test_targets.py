"""Standalone folders: a model with its absorbed weights inside."""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from snapshots import same_values, snapshot
from variants import (
    attention_weights,
    config_v3,
    write_checkpoint,
)

import mla_convert
from mla_convert import placing
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import OutputError, UsageError
from mla_convert.storage import AbsorbedCheckpoint


@pytest.fixture(scope="module")
def source(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The example with everything that public repositories have beside the weights."""
    folder = tmp_path_factory.mktemp("targets") / "source"
    shutil.copytree(example_path, folder)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: model-license\nlanguage: en\n---\n# Model\n")
    (folder / "LICENSE").write_text("Do as you like.")
    (folder / "modeling_own.py").write_text("# code\n")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.png").write_bytes(b"png")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    convert(folder, folder)  # absorbed weights of its own are not taken over
    return folder


@pytest.fixture(scope="module")
def standalone(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("standalone") / "out"
    convert(source, out, target="standalone", form="factored")
    return out


def test_a_standalone_folder_has_everything(source: pathlib.Path, standalone: pathlib.Path) -> None:
    files = snapshot(standalone)
    ours = {name for name in files if name.startswith("mla_absorbed/")}
    assert {name.split("/")[1] for name in ours} == {
        "README.md",
        "mla_absorbed-00001-of-00001.safetensors",
        "mla_absorbed.safetensors.index.json",
        "mla_manifest.json",
    }
    theirs = {name: data for name, data in snapshot(source).items() if not name.startswith("mla_absorbed/")}
    kept = {name for name in theirs if name not in (".git/HEAD", "pytorch_model.bin", "README.md")}
    assert set(files) - ours == kept | {"README.md", "README.source.md"}
    assert all(files[name] == theirs[name] for name in kept)
    assert files["README.source.md"] == theirs["README.md"]


def test_a_standalone_folder_loads_as_it_is_and_absorbed(source: pathlib.Path, standalone: pathlib.Path) -> None:
    ids = torch.arange(3, 19).view(2, 8)
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = original(ids).logits
        model = transformers.AutoModelForCausalLM.from_pretrained(standalone, dtype=torch.float32).eval()
        assert torch.equal(model(ids).logits, expected)
        handle = mla_convert.patch(model, standalone, prefill_threshold=8)
        patched = model(ids).logits
        assert not torch.equal(patched, expected)  # computed in latent space
        handle.unpatch()
        loaded = mla_convert.load(standalone, dtype=torch.float32, patching={"prefill_threshold": 8})
        assert torch.equal(loaded(ids).logits, patched)
    # both orders of float32 sums, over 4 layers of at most 512 terms
    assert (patched - expected).abs().max() < 1e-4 * expected.abs().max()
    transformers.AutoTokenizer.from_pretrained(standalone)


def test_cards_of_a_standalone_folder(standalone: pathlib.Path) -> None:
    card, inner = (standalone / "README.md").read_text(), (standalone / "mla_absorbed/README.md").read_text()
    for text in (card, inner):
        assert "license: other\nlicense_name: model-license\n" in text and "language" not in text
        assert "| key | factored |" in text and "{" not in text
    assert 'mla_convert.load("OUT")' in card and "README.source.md" in card


@pytest.mark.parametrize(("link", "shared"), [("auto", True), ("hard", True), ("copy", False)])
def test_links(example_path: pathlib.Path, tmp_path: pathlib.Path, link: str, shared: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)
    plan = convert(source, tmp_path / "out", target="standalone", link=link, dry_run=True)
    report = convert(source, tmp_path / "out", target="standalone", link=link)
    weights = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    small = sum(f.stat().st_size for f in source.iterdir() if f.suffix in (".json", ".txt") and f.name != "config.json")
    absorbed = sum(t.nbytes for t in AbsorbedCheckpoint.open(tmp_path / "out").manifest.tensors.values())
    assert plan.bytes_out == report.bytes_out == absorbed + small + (0 if shared else weights)
    for file in source.glob("*.safetensors"):
        assert file.samefile(tmp_path / "out" / file.name) == shared
    for name in ("tokenizer.json", "config.json"):
        assert not (source / name).samefile(tmp_path / "out" / name)


def test_links_that_cannot_be(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(placing, "_reflink", refuse)
    with pytest.raises(OutputError, match=r"cannot be linked into .* \(Invalid cross-device link\); use link='auto'"):
        convert(source, tmp_path / "hard", target="standalone", link="hard")
    with pytest.raises(OutputError, match=r"cannot share its blocks with .*; use link='auto' or copy"):
        convert(source, tmp_path / "reflink", target="standalone", link="reflink")
    plan = convert(source, tmp_path / "auto", target="standalone", dry_run=True)
    assert plan.bytes_out > sum(file.stat().st_size for file in source.glob("*.safetensors"))  # they have to be copied
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]
    convert(source, tmp_path / "auto", target="standalone")
    assert not (tmp_path / "auto/model-00001-of-00003.safetensors").samefile(
        source / "model-00001-of-00003.safetensors"
    )


def test_shared_blocks(example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with reflinks, whose one call is answered here by a copy: no space is counted for it."""
    calls = []

    def clone(target: int, request: int, source: int) -> int:
        calls.append(request)
        os.sendfile(target, source, 0, os.fstat(source).st_size)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    plan = convert(example_path, tmp_path / "out", target="standalone", link="reflink", dry_run=True)
    weights = sorted(example_path.glob("*.safetensors"))
    assert plan.bytes_out < sum(file.stat().st_size for file in weights)
    convert(example_path, tmp_path / "out", target="standalone", link="reflink")
    assert calls == [0x40049409] * (2 + len(weights))  # FICLONE; one trial for each call
    for file in weights:
        made = tmp_path / "out" / file.name
        assert not file.samefile(made) and file.read_bytes() == made.read_bytes()
        assert file.stat().st_mtime_ns == made.stat().st_mtime_ns


def test_layers_for_multi_token_prediction_are_in_a_standalone_folder(tmp_path: pathlib.Path) -> None:
    config = config_v3(num_hidden_layers=2, first_k_dense_replace=2, num_nextn_predict_layers=1)
    tensors = {name: t for layer in range(3) for name, t in attention_weights(config, layer).items()}
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    convert(source, tmp_path / "out", target="standalone", form="factored")
    assert same_values(load_file(tmp_path / "out/model.safetensors"), tensors)
    absorbed = AbsorbedCheckpoint.open(tmp_path / "out")
    assert list(absorbed.layers) == [0, 1, 2]
    absorbed.check_source(Checkpoint.open(tmp_path / "out"))


def test_a_native_source_is_no_standalone_folder(native_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="native layout, which from_pretrained does not load; .* target='hf' first"):
        convert(native_path, tmp_path / "out", target="standalone")
    convert(native_path, tmp_path / "hf", target="hf")
    convert(tmp_path / "hf", tmp_path / "out", target="standalone")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
