"""The pass: what it stores is what the mathematics says, it says what it did, and it refuses what it cannot do."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from snapshots import snapshot
from variants import attention_weights, config_v3, write_checkpoint

import mla_convert
from mla_convert import architectures
from mla_convert.absorption import fuse_ov, fuse_qk, split_kv_b
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, FormatError, UnsupportedModelError, UsageError
from mla_convert.storage import AbsorbedCheckpoint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(params=["example", "fp8", "native"])
def source(request: pytest.FixtureRequest) -> pathlib.Path:
    return request.getfixturevalue(f"{request.param}_path")  # type: ignore[no-any-return]


def small(folder: pathlib.Path, *, dtype: torch.dtype = torch.float32, layers: int = 1, **config: Any) -> pathlib.Path:
    """A random checkpoint of attention weights with ``config``'s sizes."""
    full = config_v3(dtype=str(dtype).removeprefix("torch."), **config)
    tensors = {}
    for layer in range(layers):
        tensors |= attention_weights(full, layer, dtype)
    return write_checkpoint(folder, full, tensors)


def test_factored_bytes_are_the_slices(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = convert(source, tmp_path / "out", form="factored")
    absorbed, checkpoint = AbsorbedCheckpoint.open(tmp_path / "out"), Checkpoint.open(source)
    for spec in checkpoint.layers:
        stored = absorbed.layer_tensors(spec.index)
        rows = checkpoint.weight(spec.kv_b).split([32, 32] * 8)
        assert set(stored) == {"k_b", "v_b"}
        for key, expected in (("k_b", torch.cat(rows[0::2])), ("v_b", torch.cat(rows[1::2]))):
            assert stored[key].dtype == torch.bfloat16
            assert torch.equal(stored[key].view(torch.int16), expected.view(torch.int16))
    exact = checkpoint.quantization is None
    assert (report.largest_error == 0.0) == exact and (report.largest_error_tensor is None) == exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_is_the_product_of_the_source_rounded_once(
    source: pathlib.Path, tmp_path: pathlib.Path, dtype: str
) -> None:
    convert(source, tmp_path / "out", form="fused", dtype=dtype)
    absorbed, checkpoint = AbsorbedCheckpoint.open(tmp_path / "out"), Checkpoint.open(source)
    for spec in checkpoint.layers:
        g, stored = spec.geometry, absorbed.layers[spec.index]
        kv_b, query, o = (checkpoint.weight(name, torch.float32).double() for name in (spec.kv_b, spec.query, spec.o))
        keys = kv_b.view(g.num_heads, -1, g.kv_lora_rank)
        qk = torch.empty(g.num_heads, g.latent_width, g.query_rank, dtype=torch.float64)
        heads = query.view(g.num_heads, -1, g.query_rank)
        qk[:, : g.kv_lora_rank] = torch.einsum("hnc,hnq->hcq", keys[:, :32], heads[:, :32])
        qk[:, g.kv_lora_rank :] = heads[:, 32:]
        ov = torch.einsum("dhv,hvc->dhc", o.view(g.hidden_size, g.num_heads, -1), keys[:, 32:])
        for key, expected in (("qk", qk.flatten(0, 1)), ("ov", ov.flatten(1, 2))):
            tensor = absorbed.read(stored.tensors[key].name)
            assert tensor.dtype == DTYPES[dtype]
            error, largest = (tensor.double() - expected).abs(), expected.abs().max()
            info = torch.finfo(DTYPES[dtype])
            # one rounding of the result; float32 sums over 32 terms; float16's subnormals
            bound = info.eps / 2 * expected.abs() + 34 * 2**-24 * largest + info.eps * info.smallest_normal
            assert (error <= bound).all()
            figures = stored.tensors[key]
            if dtype == "float32":
                assert figures.largest_error == figures.frobenius_error == 0
            else:
                assert figures.largest_error == pytest.approx(float(error.max() / largest), rel=1e-3)
                assert figures.frobenius_error == pytest.approx(float(error.norm() / expected.norm()), rel=1e-3)


def test_dtype_of_the_source(tmp_path: pathlib.Path) -> None:
    for dtype in DTYPES.values():
        path = small(tmp_path / f"source-{dtype}", dtype=dtype)
        report = convert(path, tmp_path / f"out-{dtype}", qk="fused")
        assert report.dtype == str(dtype).removeprefix("torch.")
        stored = AbsorbedCheckpoint.open(tmp_path / f"out-{dtype}").layer_tensors(0)
        assert {tensor.dtype for tensor in stored.values()} == {dtype}


def test_sources_of_several_dtypes_are_promoted(tmp_path: pathlib.Path) -> None:
    config = config_v3()
    tensors = attention_weights(config)
    tensors = {name: t.bfloat16() if "kv_b" in name else t for name, t in tensors.items()}
    report = convert(write_checkpoint(tmp_path / "source", config, tensors), tmp_path / "out", qk="fused")
    stored = AbsorbedCheckpoint.open(tmp_path / "out").layer_tensors(0)
    assert (stored["qk"].dtype, stored["v_b"].dtype, report.dtype) == (torch.float32, torch.bfloat16, "mixed")
    assert "the dtypes that the manifest lists" in (tmp_path / "out/README.md").read_text()


def test_without_a_query_rank_the_product_comes_from_q_proj(tmp_path: pathlib.Path) -> None:
    path = small(tmp_path / "source", q_lora_rank=None)
    convert(path, tmp_path / "out", form="fused")
    spec = Checkpoint.open(path).layers[0]
    assert spec.query.endswith(".q_proj.weight")
    weights = load_file(path / "model.safetensors")
    w_uk, w_uv = split_kv_b(weights[spec.kv_b], spec.geometry)
    stored = AbsorbedCheckpoint.open(tmp_path / "out").layer_tensors(0)
    assert torch.equal(stored["qk"], fuse_qk(w_uk, weights[spec.query], spec.geometry, torch.float32))
    assert torch.equal(stored["ov"], fuse_ov(w_uv, weights[spec.o], spec.geometry, torch.float32))


def test_layers_for_multi_token_prediction_are_absorbed_too(tmp_path: pathlib.Path) -> None:
    path = small(tmp_path / "source", layers=3, num_hidden_layers=2, num_nextn_predict_layers=1)
    report = convert(path, tmp_path / "out", form="factored")
    absorbed = AbsorbedCheckpoint.open(tmp_path / "out")
    assert list(absorbed.layers) == [0, 1, 2] and report.layers == 3
    assert any("layer 2, for multi-token prediction" in note for note in report.notes)
    assert "model.layers.2.self_attn.k_b_proj.weight" in absorbed
    absorbed.check_source(Checkpoint.open(path))


AUTO = {
    "both": (dict(qk_nope_head_dim=128, v_head_dim=128), ("fused", "fused")),
    "key side": (dict(qk_nope_head_dim=128, v_head_dim=32), ("fused", "factored")),
    "value side": (dict(qk_nope_head_dim=32, v_head_dim=128), ("factored", "fused")),
    "neither": (dict(qk_nope_head_dim=32, v_head_dim=32), ("factored", "factored")),
}
WIDE = dict(hidden_size=256, num_attention_heads=2, kv_lora_rank=64, q_lora_rank=256, qk_rope_head_dim=16)


@pytest.mark.parametrize("case", AUTO)
def test_auto_takes_the_form_that_reads_less_on_each_side(tmp_path: pathlib.Path, case: str) -> None:
    sizes, (qk, vo) = AUTO[case]
    report = convert(small(tmp_path / "source", layers=2, num_hidden_layers=2, **WIDE, **sizes), tmp_path / "out")
    layer = AbsorbedCheckpoint.open(tmp_path / "out").layers[1]
    assert (layer.qk, layer.vo) == (report.qk.form, report.vo.form) == (qk, vo)
    n, v = sizes["qk_nope_head_dim"], sizes["v_head_dim"]
    assert (report.qk.factored, report.qk.fused) == (2 * 2 * n * (64 + 256), 2 * 2 * 64 * 256)
    assert (report.vo.factored, report.vo.fused) == (2 * 2 * v * (256 + 64), 2 * 256 * 2 * 64)
    written = json.loads((tmp_path / "out/mla_manifest.json").read_text())["layers"][1]["numbers_read_per_step"]
    assert written["qk"] == {"factored": report.qk.factored // 2, "fused": report.qk.fused // 2}


def test_sides_override_the_form(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = {
        ("fused", None, "factored"): ("fused", "factored"),
        ("factored", "fused", None): ("fused", "factored"),
        ("auto", "fused", "fused"): ("fused", "fused"),
        ("fused", "auto", None): ("factored", "fused"),
    }
    for number, ((form, qk, vo), found) in enumerate(expected.items()):
        report = convert(example_path, tmp_path / str(number), form=form, qk=qk, vo=vo)
        assert (report.qk.form, report.vo.form) == found


def test_same_source_and_options_give_the_same_bytes(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(example_path, elsewhere)
    convert(example_path, tmp_path / "first", form="fused")
    convert(elsewhere, tmp_path / "second", form="fused")
    first = snapshot(tmp_path / "first")
    assert first == snapshot(tmp_path / "second")
    convert(example_path, tmp_path / "third", form="fused", dtype="float32")
    assert first != snapshot(tmp_path / "third")
    assert not any(str(tmp_path).encode() in data or str(example_path).encode() in data for data in first.values())


def test_report(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    calls: list[tuple[int, int]] = []
    report = convert(example_path, tmp_path / "out", qk="fused", progress=lambda *done: calls.append(done))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(report.files) == set(snapshot(tmp_path / "out")) and report.files[-1] == "mla_manifest.json"
    assert report.bytes_in == 4 * 2 * (512 * 64 + 384 * 96)  # kv_b_proj and q_b_proj
    assert report.bytes_out == 4 * 2 * (8 * 80 * 96 + 256 * 64)
    assert report.out == str(tmp_path / "out") and not report.dry_run and report.seconds > 0
    tensors = AbsorbedCheckpoint.open(tmp_path / "out").manifest.tensors
    assert report.largest_error_tensor is not None
    assert report.largest_error == max(tensor.largest_error for tensor in tensors.values())
    assert tensors[report.largest_error_tensor].largest_error == report.largest_error > 0
    assert json.loads(json.dumps(report.to_dict()))["qk"] == {"form": "fused", "factored": 163840, "fused": 196608}


def test_dry_run_plans_the_same_and_writes_nothing(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = list(tmp_path.rglob("*"))
    plan = convert(example_path, tmp_path / "made" / "out", qk="fused", dry_run=True)
    assert list(tmp_path.rglob("*")) == before
    done = convert(example_path, tmp_path / "made" / "out", qk="fused")
    assert (plan.dry_run, plan.files, plan.largest_error) == (True, (), None)
    for field in ("layers", "dtype", "qk", "vo", "bytes_in", "bytes_out", "out"):
        assert getattr(plan, field) == getattr(done, field)
    with pytest.raises(UsageError, match="already holds absorbed weights"):
        convert(example_path, tmp_path / "made" / "out", dry_run=True)


def test_manifest_describes_the_source(fp8_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(fp8_path, tmp_path / "out", vo="fused")
    manifest = json.loads((tmp_path / "out/mla_manifest.json").read_text())
    checkpoint = Checkpoint.open(fp8_path)
    assert manifest["tool_version"] == mla_convert.__version__
    assert (manifest["source"]["model_type"], manifest["source"]["layout"]) == ("deepseek_v3", "sharded")
    names = {name for spec in checkpoint.layers for name in (spec.kv_b, spec.o)}
    assert set(manifest["source"]["tensors"]) == names
    name = checkpoint.layers[1].kv_b
    assert manifest["source"]["tensors"][name] == {
        "shape": [512, 64],
        "dtype": "float8_e4m3fn",
        "sha256": checkpoint.digest(name),
        "source_dtype": "bfloat16",
        "quantized": True,
        "form": "float8, 8 bits, blocks of 128×128",
        "companions": {name + "_scale_inv": checkpoint.digest(name + "_scale_inv")},
    }


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_threads_change_no_byte(example_path: pathlib.Path, tmp_path: pathlib.Path, form: str) -> None:
    """Shards, index, manifest with its error figures, and card, however many threads there are."""
    given = {"form": form, "max_shard_bytes": 150_000}
    folders = [tmp_path / str(workers) for workers in (1, 2, 5, 16)]
    for folder in folders:
        convert(example_path, folder, workers=int(folder.name), **given)  # type: ignore[arg-type]
    convert(example_path, tmp_path / "default", **given)  # type: ignore[arg-type]
    one, *others = map(snapshot, (*folders, tmp_path / "default"))
    assert all(other == one for other in others) and len(one) > 4


def test_a_dry_run_prints_what_is_free(
    example_path: pathlib.Path, tmp_path: pathlib.Path, invoke: Callable[..., Any]
) -> None:
    result = invoke("convert", example_path, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0 and list(tmp_path.iterdir()) == []
    assert re.search(r"free on the disk\W+[\d.,]+ .B", result.stdout) and "kept of what is read" not in result.stdout
    result = invoke("convert", example_path, tmp_path / "out", "--dry-run", "--json", "-")
    free = json.loads(result.stdout)["bytes_free"]
    assert abs(free - shutil.disk_usage(tmp_path).free) < 2**33  # other processes write meanwhile


def test_model_card(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(example_path, tmp_path / "out", qk="fused")
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model" not in card and 'from_pretrained("SOURCE")' in card
    assert (
        "| key | fused | 163.8 | 196.6 | " in card
        and "| value | factored | 262.1 | 393.2 | 0 (exact) | 0 (exact) |" in card
    )
    assert 'mla_convert.patch(model, "OUT")' in card and "{" not in card


@pytest.mark.parametrize(
    ("name", "known"),
    [("deepseek-ai/DeepSeek-V3", True), ("/home/me/model", False), ("./model", False), ("model", False), (7, False)],
)
def test_model_card_names_the_base_model_where_the_config_does(
    tmp_path: pathlib.Path, name: object, known: bool
) -> None:
    convert(small(tmp_path / "source", _name_or_path=name), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert (f"\nbase_model: {name}\n" in card) == known
    assert known or str(name) not in card.replace("model", "") or name == "model"


@pytest.mark.parametrize("target", ["sidecar", "standalone", "hf", "native"])
def test_the_card_of_every_target(
    example_path: pathlib.Path, tmp_path: pathlib.Path, invoke: Callable[..., Any], target: str
) -> None:
    """A name given on the command line; parts, what was left out, and how to load it are said."""
    name = "deepseek-ai/DeepSeek-V3"
    parts = ["--parts", "2"] if target == "native" else []
    arguments = ["convert", example_path, tmp_path / "out", "--target", target, "--base-model", name, *parts]
    assert invoke(*arguments).exit_code == 0
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith(f"---\nbase_model: {name}\n") and "{" not in card
    assert ("every number, codes and scales alike, has the bits that it had" in card) == (target in ("hf", "native"))
    loads = {"native": "one process for each part (2)", "hf": 'from_pretrained("OUT"'}
    assert loads.get(target, "OUT") in card
    result = invoke("convert", example_path, tmp_path / "other", "--base-model", "/home/me/model")
    assert result.exit_code == 2 and "is no name of a model on the hub; give org/name" in result.stderr


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "form": (dict(form="half"), "form='half' is not known; supported are factored, fused and auto"),
    "no form": (dict(form=None), "form=None is not known; supported are factored, fused and auto"),
    "form of another type": (dict(form=["fused"]), r"form=\['fused'\] is not known"),
    "qk": (dict(qk="Fused"), "qk='Fused' is not known"),
    "vo": (dict(vo=""), "vo='' is not known"),
    "no side left": (dict(form="fused", qk="factored", vo="factored"), "form='fused' was asked for, and qk='factored'"),
    "dtype": (dict(dtype="int8"), "dtype='int8'; supported are source, bfloat16, float16, float32"),
    "torch dtype": (dict(dtype=torch.float64), "dtype='float64'; supported"),
    "dtype of another type": (dict(dtype=["float32"]), r"dtype=\['float32'\]; supported"),
    "quantize": (dict(quantize="int3"), "quantize='int3'; supported are int8, fp8, int4"),
    "qk_bits": (dict(qk_bits=5), "qk_bits=5; supported are 4"),
    "vo_bits": (dict(quantize="int8", vo_bits=True), "vo_bits=True; supported are 4"),
    "group_size alone": (dict(group_size=32), "group_size=32; it belongs to int4 and fp8"),
    "group_size": (dict(quantize="int4", group_size=48), "group_size=48; supported here are 32, 64, 128"),
    "group_size of fp8": (dict(quantize="fp8", group_size=32), "group_size=32; supported here are 128, row"),
    "group_size of int8": (dict(quantize="int8", group_size=128), "group_size=128; it belongs to int4 and fp8"),
    "nothing to calibrate": (dict(calibrate="text.txt"), "nothing is quantized: add quantize"),
    "no text": (dict(quantize="int8", calibrate="none.txt"), "none.txt cannot be read as text"),
    "groups": (dict(quantize="int4", group_size=128), "k_b_proj.weight has 64 columns, .* sizes that fit are 32, 64"),
    "target": (dict(target="gguf"), "target='gguf'; supported are sidecar, standalone, hf, native"),
    "parts": (dict(parts=2), "parts=2 belongs to target='native'"),
    "no parts": (dict(target="native", parts=0), "parts=0; a native checkpoint has a whole number of parts"),
    "parts as text": (dict(target="native", parts="two"), "parts='two'"),
    "link of a sidecar": (dict(link="hard"), "link='hard' belongs to target='standalone'"),
    "link": (dict(target="standalone", link="soft"), "link='soft'; supported are auto, hard, reflink, copy"),
    "values for native": (dict(target="native", form="fused"), "form='fused': target='native' keeps every value"),
    "values for hf": (dict(target="hf", quantize="int8"), "quantize='int8': target='hf' keeps every value"),
    "workers": (dict(workers=0), "workers=0; a run needs a whole number of threads"),
    "workers as text": (dict(workers="two"), "workers='two'; a run needs"),
    "device": (dict(device="cuda:77"), "device='cuda:77' cannot be used here"),
    "device of another type": (dict(device=[]), r"device='\[\]' cannot be used here"),
    "no device": (dict(device="abacus"), "device='abacus' cannot be used here"),
    "shard size": (dict(max_shard_bytes=0), "max_shard_bytes=0; a shard needs a whole, positive number of bytes"),
    "shard size as text": (dict(max_shard_bytes="5GB"), "max_shard_bytes='5GB'; a shard needs"),
    "broken shard size": (dict(max_shard_bytes=1e9), "max_shard_bytes=1000000000.0; a shard needs"),
    "no shard size": (dict(target="hf", max_shard_bytes=True), "max_shard_bytes=True; a shard needs"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_be(example_path: pathlib.Path, tmp_path: pathlib.Path, case: str) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(UsageError, match=message):
        convert(example_path, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_torch_dtypes_and_neutral_options_are_taken(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = convert(Checkpoint.open(example_path), tmp_path / "out", dtype=torch.float32, workers=1, resume=False)
    assert report.dtype == "float32"


@pytest.mark.parametrize(("side", "attribute"), [("qk", "between_qk"), ("vo", "between_vo")])
def test_sides_that_may_not_be_fused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, side: str, attribute: str
) -> None:
    path = small(tmp_path / "source", **WIDE, qk_nope_head_dim=128, v_head_dim=128)  # auto would fuse both
    family = dataclasses.replace(
        architectures.find_family({"model_type": "deepseek_v3"}), **{attribute: "a gate stands there"}
    )
    monkeypatch.setitem(architectures._BY_TYPE, "deepseek_v3", family)
    for options in ({side: "fused"}, {"form": "fused"}):
        with pytest.raises(
            UsageError, match="side of deepseek_v3 cannot be fused: a gate stands there; .*='factored' or auto"
        ):
            convert(path, tmp_path / "out", **options)
    report = convert(path, tmp_path / "out")
    assert {"qk": report.qk.form, "vo": report.vo.form} == {"qk": "fused", "vo": "fused", side: "factored"}


@pytest.mark.parametrize("options", [dict(form="fused"), dict(form="factored")], ids=str)
def test_overflow_names_the_tensor_and_leaves_nothing(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    config = config_v3()
    tensors = {name: tensor * 40000 for name, tensor in attention_weights(config).items()}
    path = write_checkpoint(tmp_path / "source", config, tensors)
    message = (
        r"model\.layers\.\d\.self_attn\.(qk_absorbed|ov_absorbed|k_b_proj|v_b_proj)\.weight: "
        r"the largest magnitude is .* float16 ends at"
    )  # all are too large; which of them is met first is left to the threads
    with pytest.raises(UsageError, match=message):
        convert(path, tmp_path / "out", dtype="float16", **options)
    assert not (tmp_path / "out").exists()
    convert(path, tmp_path / "out", dtype="bfloat16", **options)


def test_weights_that_are_not_floats_are_refused(tmp_path: pathlib.Path) -> None:
    config = config_v3()
    tensors = attention_weights(config)
    tensors = {name: t.to(torch.int8) if "kv_b" in name else t for name, t in tensors.items()}
    path = write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(FormatError, match="int8"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_leaves_nothing(tmp_path: pathlib.Path) -> None:
    config = config_v3(num_hidden_layers=2)
    tensors = attention_weights(config, 0) | attention_weights(config, 1)
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][3, 4] = torch.nan
    path = write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(FormatError, match=r"layers\.1\.self_attn\.kv_b_proj\.weight has 1 NaN"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError):
        convert(tmp_path / "nowhere", tmp_path / "out")
    write_checkpoint(tmp_path / "llama", {"model_type": "llama"}, {"x": torch.ones(1)})
    with pytest.raises(UnsupportedModelError, match="llama"):
        convert(tmp_path / "llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()
