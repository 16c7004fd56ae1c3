"""Whole folders: a model with its absorbed weights inside, and the same values in another layout."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from snapshots import snapshot
from variants import (
    attention_weights,
    config_v3,
    fp8_config,
    load_all,
    native_config,
    quantize_all,
    split_native,
    write_checkpoint,
)

import mla_convert
from mla_convert import disk, placing
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, FormatError, OutputError, SidecarError, UsageError
from mla_convert.ranks import World
from mla_convert.storage import AbsorbedCheckpoint


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    same = (left.dtype, left.shape) == (right.dtype, right.shape)
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def same_values(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(equal(left[name], right[name]) for name in left)


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


# --- standalone


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
    with pytest.raises(OutputError, match=r"cannot be linked to .* \(Invalid cross-device link\); use link auto or"):
        convert(source, tmp_path / "hard", target="standalone", link="hard")
    with pytest.raises(OutputError, match=r"cannot share its blocks with .*; use link auto or copy"):
        convert(source, tmp_path / "reflink", target="standalone", link="reflink")
    convert(source, tmp_path / "auto", target="standalone")
    assert not (tmp_path / "auto/model-00001-of-00003.safetensors").samefile(
        source / "model-00001-of-00003.safetensors"
    )


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
    with pytest.raises(UsageError, match="native layout, which from_pretrained does not load; .* target hf first"):
        convert(native_path, tmp_path / "out", target="standalone")
    convert(native_path, tmp_path / "hf", target="hf")
    convert(tmp_path / "hf", tmp_path / "out", target="standalone")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- other layouts


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_native_parts_are_those_of_another_writer(
    example_path: pathlib.Path, tmp_path: pathlib.Path, parts: int
) -> None:
    report = convert(example_path, tmp_path / "out", target="native", parts=parts)
    config = json.loads((example_path / "config.json").read_text())
    expected = split_native(load_all(example_path), parts, config["n_routed_experts"])
    for number, part in enumerate(expected):
        assert same_values(load_file(tmp_path / "out" / f"model{number}-mp{parts}.safetensors"), part)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert native_config(config).items() <= written.items()
    assert (tmp_path / "out/tokenizer.json").is_file() and report.qk is None and report.target == "native"
    assert report.bytes_in <= report.bytes_out


@pytest.mark.parametrize("kind", ["example", "fp8"])
def test_there_and_back_every_bit_is_the_same(
    example_path: pathlib.Path, fp8_path: pathlib.Path, tmp_path: pathlib.Path, kind: str
) -> None:
    source = {"example": example_path, "fp8": fp8_path}[kind]
    convert(source, tmp_path / "native", target="native", parts=1 if kind == "fp8" else 4)
    there = Checkpoint.open(tmp_path / "native")
    assert there.layout == "native" and (there.quantization is None) == (kind == "example")
    convert(tmp_path / "native", tmp_path / "back", target="hf", max_shard_bytes=300_000)
    convert(tmp_path / "back", tmp_path / "again", target="native", parts=1)
    convert(tmp_path / "again", tmp_path / "other", target="native", parts=1 if kind == "fp8" else 2)
    convert(tmp_path / "other", tmp_path / "last", target="hf")
    original = load_all(source)
    assert same_values(load_all(tmp_path / "back"), original) and same_values(load_all(tmp_path / "last"), original)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    back = Checkpoint.open(tmp_path / "back")
    assert [spec.geometry for spec in back.layers] == [spec.geometry for spec in Checkpoint.open(source).layers]
    # absorbed weights of one are those of the other
    convert(source, tmp_path / "absorbed")
    AbsorbedCheckpoint.open(tmp_path / "absorbed").check_source(back)


def test_parts_share_codes_and_scales(tmp_path: pathlib.Path) -> None:
    """FP8 blocks in two parts: each has its heads' codes with their own scales, and back it is what it was."""
    sizes = dict(hidden_size=200, num_attention_heads=4, q_lora_rank=130, kv_lora_rank=72, v_head_dim=64)
    config = config_v3(dtype="bfloat16", qk_nope_head_dim=64, qk_rope_head_dim=64, **sizes)
    tensors = quantize_all(attention_weights(config, dtype=torch.bfloat16))
    source = write_checkpoint(tmp_path / "source", config | {"quantization_config": fp8_config()}, tensors)
    convert(source, tmp_path / "native", target="native", parts=2)
    second = load_file(tmp_path / "native/model1-mp2.safetensors")
    rows = tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"]
    columns = tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    assert second["layers.0.attn.wkv_b.weight"].shape == (256, 72)
    assert torch.equal(second["layers.0.attn.wkv_b.scale"], rows[2:])
    assert torch.equal(second["layers.0.attn.wo.scale"], columns[:, 1:])
    convert(tmp_path / "native", tmp_path / "back", target="hf")
    assert same_values(load_all(tmp_path / "back"), tensors)


def test_a_shared_model_computes_the_same(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(example_path, tmp_path / "native", target="native", parts=2)
    convert(tmp_path / "native", tmp_path / "back", target="hf")
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (example_path, tmp_path / "back")
        ]
    assert torch.equal(*logits)


def test_what_the_native_layout_leaves_out(tmp_path: pathlib.Path) -> None:
    config = config_v3(
        num_hidden_layers=2, first_k_dense_replace=2, dtype="bfloat16", num_nextn_predict_layers=1, qk_rope_head_dim=4
    )
    tensors = {name: t for layer in range(3) for name, t in attention_weights(config, layer, torch.bfloat16).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    report = convert(write_checkpoint(tmp_path / "source", config, tensors), tmp_path / "out", target="native")
    left = 2 + len(attention_weights(config))
    assert any(f"{left} tensors were left out" in note for note in report.notes)
    kept = {name for name in tensors if ".layers.2." not in name and "inv_freq" not in name}
    assert set(Checkpoint.open(tmp_path / "out").names()) == kept


def small(folder: pathlib.Path, extra: dict[str, torch.Tensor] | None = None, **config: Any) -> pathlib.Path:
    full = config_v3(**{"dtype": "bfloat16"} | config)
    dtype = getattr(torch, full["dtype"])
    return write_checkpoint(folder, full, attention_weights(full, dtype=dtype) | (extra or {}))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
NOT_NATIVE: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "float32": (
        dict(dtype="float32"),
        {},
        FormatError,
        "SOURCE is in float32; DeepSeek's native layout holds bfloat16",
    ),
    "epsilon": (dict(rms_norm_eps=1e-5), {}, UsageError, "rms_norm_eps = 1e-05, and DeepSeek's .* computes with 1e-06"),
    "rope": (
        dict(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
        {},
        UsageError,
        "config has rope_parameters = .*'mscale_all_dim': 1.0.*, and DeepSeek's native code computes with",
    ),
    "heads": ({}, dict(parts=5), UsageError, r"parts=5: .*kv_b_proj.weight has 28 rows, .* a divisor of 28"),
}


@pytest.mark.parametrize("case", NOT_NATIVE)
def test_what_native_cannot_hold(tmp_path: pathlib.Path, case: str) -> None:
    config, options, error, message = NOT_NATIVE[case]
    source = small(tmp_path / "source", **config)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", target="native", **options)
    assert not (tmp_path / "out").exists()


def test_tensors_without_a_native_name(tmp_path: pathlib.Path) -> None:
    source = small(tmp_path / "source", {"model.layers.0.self_attn.indexer.wk.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"indexer\.wk\.weight has no name in DeepSeek's native layout"):
        convert(source, tmp_path / "out", target="native")


def test_experts_and_blocks_that_cannot_be_shared(
    example_path: pathlib.Path, fp8_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UsageError, match="parts=16: 8 experts cannot be shared evenly; take a divisor of 8"):
        convert(example_path, tmp_path / "out", target="native", parts=16)
    with pytest.raises(UsageError, match=r"parts=4: .* cut through its FP8 blocks of 128"):
        convert(fp8_path, tmp_path / "out", target="native", parts=4)


# --- what whole folders share


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_whole_models_go_into_empty_folders(example_path: pathlib.Path, tmp_path: pathlib.Path, target: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    for out, message in (("source", "is SOURCE itself, which is never changed"), ("used", "holds notes.txt; a whole")):
        with pytest.raises(UsageError, match=message):
            convert(source, tmp_path / out, target=target)
    convert(source, tmp_path / "out", target=target)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"out holds .*; a whole model goes into a new or empty folder"):
        convert(source, tmp_path / "out", target=target)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_the_source_stays_as_it_is(example_path: pathlib.Path, tmp_path: pathlib.Path, target: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}
    plan = convert(source, tmp_path / "out", target=target, dry_run=True)
    assert not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", target=target)
    assert (plan.bytes_in, plan.bytes_out) == (report.bytes_in, report.bytes_out)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()} == before
    assert set(report.files) == set(snapshot(tmp_path / "out")) and report.files[-1] == "config.json"
    assert report.files[0].endswith(".safetensors")


class Stop(BaseException):
    """Ends a run anywhere."""


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_whole_folders_are_complete_or_do_not_load(
    tmp_path: pathlib.Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at every rename, as by Ctrl-C: nothing loads, and the next call finishes it."""
    source = small(tmp_path / "source")
    (source / "LICENSE").write_text("free")
    convert(source, tmp_path / "whole", target=target)
    whole, names = snapshot(tmp_path / "whole"), len(snapshot(tmp_path / "whole"))
    move = disk.move
    for stop in range(names):
        out, moved = tmp_path / f"out-{stop}", []

        def stopping(a: pathlib.Path, b: pathlib.Path, moved: list[str] = moved, stop: int = stop) -> None:
            if len(moved) == stop:
                raise KeyboardInterrupt
            moved.append(b.name)
            move(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "move", stopping)
            with pytest.raises(KeyboardInterrupt, match="the same command goes on from there"):
                convert(source, out, target=target)
        assert "config.json" not in moved
        with pytest.raises(CheckpointError, match=r"has no config.json"):
            Checkpoint.open(out)
        with pytest.raises(UsageError, match="out-.* holds mine.txt"):
            (out / "mine.txt").write_text("mine")
            convert(source, out, target=target)
        (out / "mine.txt").unlink()
        report = convert(source, out, target=target)
        assert any("were done before" in note for note in report.notes)
        assert snapshot(out) == whole
        assert not (out / ".mla_absorbed.incomplete").exists()


def test_ranks_write_a_layout_together(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import concurrent.futures

    def rank(number: int) -> None:
        world = World(number, 2, 1, "this")
        convert(example_path, tmp_path / "out", target="hf", max_shard_bytes=300_000, world=world, workers=1)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    convert(example_path, tmp_path / "one", target="hf", max_shard_bytes=300_000)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "one")


def test_a_half_done_standalone_folder_has_no_absorbed_weights_without_its_manifest(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = disk.move

    def stopping(a: pathlib.Path, b: pathlib.Path) -> None:
        if b.name == "mla_manifest.json":
            raise KeyboardInterrupt
        move(a, b)

    monkeypatch.setattr(disk, "move", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(example_path, tmp_path / "out", target="standalone")
    with pytest.raises(SidecarError, match="holds an interrupted conversion"):
        AbsorbedCheckpoint.open(tmp_path / "out")
