"""``inspect``: what is said of checkpoints and of what convert wrote, sound and not."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from coded import FORMS, write_coded
from interruptions import killed
from spoiling import KV_B, cut, edit, only, remove, single, write
from variants import attention_weights, config_v3, write_checkpoint

import mla_convert
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError
from mla_convert.inspection import inspect_checkpoint

Invoke = Callable[..., Any]


def test_a_plain_checkpoint(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = mla_convert.inspect_checkpoint(example_path)
    source = found.source
    assert found.sound and source is not None and found.absorbed is None
    assert (source.model_type, source.layout, source.quantization) == ("deepseek_v3", "sharded", None)
    (dimensions,) = source.dimensions
    assert dimensions.layers == (0, 1, 2, 3) and dimensions.geometry == Checkpoint.open(example_path).layers[0].geometry
    kinds = {kind.name: kind for kind in source.kinds}
    assert kinds["kv_b_proj"].shape == (512, 64) and kinds["kv_b_proj"].stored == "bfloat16"
    assert (kinds["kv_b_proj"].layers, kinds["kv_b_proj"].bytes) == (4, 4 * 512 * 64 * 2)
    stored = sum(file.stat().st_size for file in example_path.glob("*.safetensors"))
    assert 0.9 * stored < source.bytes < stored and source.bytes_attention == sum(kind.bytes for kind in source.kinds)
    assert source.conversion is not None
    for form, expected in (("auto", source.conversion.auto), ("factored", source.conversion.factored)):
        assert convert(example_path, tmp_path / form, form=form, dry_run=True).bytes_out == expected
    assert convert(example_path, tmp_path / "x", form="fused", dry_run=True).bytes_out == source.conversion.fused


def test_nothing_but_headers_is_read(example_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_convert.checkpoint.read_piece", None)
    assert inspect_checkpoint(example_path).sound


def test_codes(tmp_path: pathlib.Path) -> None:
    form = FORMS["GPTQ, order"]
    write_coded(tmp_path, form, quantization_config=form.config | {"modules_to_not_convert": ["lm_head", "gone"]})
    found = inspect_checkpoint(tmp_path)
    assert found.source is not None and found.source.quantization == "gptq"
    stored = {kind.name: kind.stored for kind in found.source.kinds}
    assert stored["kv_b_proj"] == "gptq, 4 bits, groups of 16, zero points +1"
    assert stored["kv_a_layernorm"] == "bfloat16"
    assert any("not there: lm_head, gone" in note for note in found.notes)


def test_another_method_beside_plain_attention(tmp_path: pathlib.Path) -> None:
    config = config_v3(quantization_config={"quant_method": "hqq"})
    write_checkpoint(tmp_path, config, attention_weights(config))
    found = inspect_checkpoint(tmp_path)
    assert found.sound and "attention is plain and can be converted" in found.notes[0]


def test_what_convert_wrote(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = convert(example_path, tmp_path / "out", vo="fused", qk_bits=8)
    found = inspect_checkpoint(tmp_path / "out")
    absorbed = found.absorbed
    assert found.sound and found.source is None and absorbed is not None
    assert (absorbed.model_type, absorbed.qk, absorbed.vo) == ("deepseek_v3", "factored", "fused")
    assert absorbed.bytes == report.bytes_out and absorbed.source_forms == ("bfloat16",)
    assert {kind.name: kind.stored for kind in absorbed.kinds} == {
        "k_b_proj": "int8 per row",
        "ov_absorbed": "bfloat16",
    }
    (tmp_path / "out/mla_manifest.json").write_text("{}")
    assert "mla_manifest.json" in inspect_checkpoint(tmp_path / "out").problems[0]


def test_a_checkpoint_with_absorbed_weights_inside(tmp_path: pathlib.Path) -> None:
    single(tmp_path)
    convert(tmp_path, tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.source is not None and found.absorbed is not None and found.sound
    assert found.absorbed.folder == str(tmp_path / "mla_absorbed")


def test_an_interrupted_conversion(tmp_path: pathlib.Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its folder, and inside the checkpoint that it was made of."""
    source = tmp_path / "source"
    single(source)
    for number, out in enumerate((tmp_path / "out", source)):
        with monkeypatch.context() as patch:
            killed(source, out, patch, 12)
        result = invoke("inspect", out, "--json", "-")
        report = json.loads(result.stdout)
        assert result.exit_code == 1 and (report["source"] is None) == (number == 0)
        (problem,) = report["problems"]
        assert "holds an interrupted conversion" in problem and "run the same conversion again" in problem


PROBLEMS: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "cut short": (cut("model.safetensors", -1), "is cut short"),
    "a missing tensor": (lambda folder: edit(folder, lambda t: t.pop(KV_B)), f"layer 0 lacks {KV_B}"),
    "a surplus scale": (
        lambda folder: edit(folder, lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(1, 1)})),
        "is surplus",
    ),
    "GGUF": (only("model.gguf"), "GGUF"),
    "another family": (write("config.json", '{"model_type": "llama"}'), "does not use MLA"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_is_said_and_exits_with_1(name: str, tmp_path: pathlib.Path, invoke: Invoke) -> None:
    spoil, words = PROBLEMS[name]
    single(tmp_path)
    spoil(tmp_path)
    result = invoke("inspect", tmp_path, "--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and words in report["problems"][0] and words in result.stderr
    assert (report["source"] is None) == (name == "another family")


def test_nothing_to_look_at(tmp_path: pathlib.Path, invoke: Invoke) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        inspect_checkpoint(tmp_path)
    single(tmp_path)
    remove("config.json")(tmp_path)
    result = invoke("inspect", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "") and "has no config.json" in result.stderr


def test_the_tables(example_path: pathlib.Path, invoke: Invoke) -> None:
    result = invoke("inspect", example_path)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("deepseek_v3, layers 0–3", "kv_b_proj", "512×64", "bfloat16", "to convert", "key side"):
        assert words in result.stdout
