"""Sidecars in codes of FP8 sources: what compressed-tensors makes of the stored files, and slices without loss."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from coded import FORMS, write_coded
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor
from variants import attention_weights, config_v3, fp8_config, load_all, quantize_all, write_checkpoint

import mla_convert
from mla_convert.architectures import LayerSpec
from mla_convert.checkpoint import Checkpoint
from mla_convert.quantization import quantize
from mla_convert.schemes import FP8_BLOCKS, FP8_ROWS, INT8, Scheme, int4

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


def decompressed(folder: pathlib.Path) -> Iterator[tuple[int, str, Tensor]]:
    """Every stored tensor (layer, key, weight), by compressed-tensors alone: the manifest's config and the files."""
    manifest = json.loads((folder / "mla_manifest.json").read_text())
    config = QuantizationConfig.model_validate(manifest["quantization"])
    stored = load_all(folder)
    for layer in manifest["layers"]:
        for key, entry in layer["tensors"].items():
            module = entry["name"].removesuffix(".weight")
            (group,) = (
                group
                for group in config.config_groups.values()
                if re.match(group.targets[0].removeprefix("re:"), module)
            )
            parts = {name.rpartition(".")[2]: part for name, part in stored.items() if name.startswith(f"{module}.")}
            compressor: Any = BaseCompressor.get_value_from_registry(group.format)
            yield layer["index"], key, compressor.decompress(parts, group)["weight"]


def exact(checkpoint: Checkpoint, spec: LayerSpec, key: str) -> Tensor:
    """The absorbed weight in float32, head by head, of the source dequantized in float32."""
    g = spec.geometry
    kv_b = checkpoint.weight(spec.kv_b, torch.float32).view(g.num_heads, -1, g.kv_lora_rank)
    w_uk, w_uv = kv_b[:, : g.qk_nope_head_dim], kv_b[:, g.qk_nope_head_dim :]
    if key in ("k_b", "v_b"):
        return (w_uk if key == "k_b" else w_uv).flatten(0, 1)
    if key == "qk":
        query = checkpoint.weight(spec.query, torch.float32).view(g.num_heads, g.qk_head_dim, -1)
        content, rotary = query[:, : g.qk_nope_head_dim], query[:, g.qk_nope_head_dim :]
        return torch.cat((torch.einsum("hnc,hnq->hcq", w_uk, content), rotary), 1).flatten(0, 1)
    o = checkpoint.weight(spec.o, torch.float32).view(g.hidden_size, g.num_heads, -1)
    return torch.einsum("dhv,hvc->dhc", o, w_uv).flatten(1)


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({"form": "factored", "quantize": "int4"}, int4(32)),
        ({"form": "factored", "quantize": "int8"}, INT8),
        ({"form": "factored", "quantize": "fp8", "group_size": "row"}, FP8_ROWS),
        ({"form": "factored", "quantize": "fp8"}, FP8_BLOCKS),  # whose blocks cross the example's heads: made anew
        ({"form": "fused", "quantize": "int8"}, INT8),
        ({"form": "fused", "quantize": "fp8"}, FP8_BLOCKS),
    ],
    ids=lambda given: " ".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_codes_come_from_the_numbers_of_an_fp8_source(
    options: dict[str, Any], scheme: Scheme, fp8_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """As if the source had been float32: nothing of the other grid is left in them."""
    report = mla_convert.convert(fp8_path, tmp_path / "out", **options)
    assert {tensor.rounding for tensor in report.tensors} == {"nearest"} and report.stored_as == str(scheme)
    assert any("were dequantized in float32" in note for note in report.notes)
    checkpoint = Checkpoint.open(fp8_path)
    specs = {spec.index: spec for spec in checkpoint.layers}
    found = list(decompressed(tmp_path / "out"))
    assert len(found) == 2 * len(specs)
    for index, key, weight in found:
        expected = quantize(exact(checkpoint, specs[index], key), scheme).dequantize()
        if options["form"] == "factored":
            assert torch.equal(weight, expected)
        else:
            # Products of another order differ in the last bits: codes by one step at the rare ties, scales by rounding.
            assert float(torch.isclose(weight, expected, rtol=1e-5, atol=0).double().mean()) > 0.999
            assert float((weight - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "fp8", "group_size": "row"}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_codes_of_every_form_are_made_anew(form: str, options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """FP8, int8, 2 to 8 bits packed, zero points, orders of their own: always from the numbers in float32."""
    write_coded(tmp_path / "source", FORMS[form])
    mla_convert.convert(tmp_path / "source", tmp_path / "out", form="factored", **options)
    checkpoint, scheme = Checkpoint.open(tmp_path / "source"), INT8 if options["quantize"] == "int8" else FP8_ROWS
    found = list(decompressed(tmp_path / "out"))
    assert [key for _, key, _ in found] == ["k_b", "v_b"]
    for _, key, weight in found:
        assert torch.equal(weight, quantize(exact(checkpoint, checkpoint.layers[0], key), scheme).dequantize())


def fp8_source(folder: pathlib.Path) -> pathlib.Path:
    """One layer of two heads whose N and V are whole blocks of 128, C one block and a half."""
    config = config_v3(
        dtype="bfloat16",
        num_key_value_heads=2,
        qk_nope_head_dim=128,
        v_head_dim=128,
        kv_lora_rank=192,
        quantization_config=fp8_config(),
    )
    return write_checkpoint(folder, config, quantize_all(attention_weights(config, dtype=torch.bfloat16)))


def test_blocks_that_line_up_are_taken_over_bit_for_bit(tmp_path: pathlib.Path) -> None:
    source = fp8_source(tmp_path / "source")
    report = mla_convert.convert(source, tmp_path / "out", form="factored", quantize="fp8")
    given, stored = load_all(source), load_all(tmp_path / "out")
    codes = given[KV_B].view(torch.uint8).view(2, 256, 192)
    scales = given[f"{KV_B}_scale_inv"].view(2, 2, 2)  # heads, key or value block, blocks of C
    for side, word in enumerate(("k_b_proj", "v_b_proj")):
        name = KV_B.replace("kv_b_proj", word)
        assert stored[name].dtype == torch.float8_e4m3fn
        assert torch.equal(stored[name].view(torch.uint8), codes[:, 128 * side : 128 * side + 128].flatten(0, 1))
        assert torch.equal(stored[f"{name}_scale"], scales[:, side])
    assert {(tensor.rounding, tensor.relative_error) for tensor in report.tensors} == {("sliced", 0.0)}
    (note,) = [note for note in report.notes if "codes" in note and "source" in note]
    assert "codes and scales of 2 tensors are the source's own, without loss" in note
    planned = mla_convert.convert(source, tmp_path / "dry", form="factored", quantize="fp8", dry_run=True)
    assert note in planned.notes


def test_only_what_is_computed_is_said_to_be_dequantized(tmp_path: pathlib.Path) -> None:
    """The value side is sliced, the key side made anew: one note each, and both agree."""
    source = fp8_source(tmp_path / "source")
    report = mla_convert.convert(source, tmp_path / "out", form="factored", quantize="fp8", qk_bits=4)
    assert report.stored_as == "int4 in groups of 32 and fp8 in blocks of 128x128"
    said = [note for note in report.notes if "source" in note and "codes" in note]
    assert len(said) == 2 and "of 1 tensors" in said[0] and said[1].startswith("all other codes of the source")
