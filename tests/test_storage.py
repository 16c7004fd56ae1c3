"""The store: what is written can be read, what is incomplete cannot, and nothing else is touched."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshots import snapshot

import mla_convert.storage as storage
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import MismatchError, SidecarError
from mla_convert.storage import AbsorbedCheckpoint

SHARD_BYTES = 150_000  # several shards for the example, two layers in most


@pytest.fixture(scope="module")
def complete(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The example converted, fused on the value side, in several shards; not to be changed."""
    out = tmp_path_factory.mktemp("complete") / "out"
    convert(example_path, out, vo="fused", max_shard_bytes=SHARD_BYTES)
    return out


@pytest.fixture
def sidecar(complete: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it, to be spoiled."""
    copy = tmp_path / "sidecar"
    copy.mkdir()
    for name, data in snapshot(complete).items():
        (copy / name).write_bytes(data)
    return copy


def test_files_are_those_that_other_readers_know(complete: pathlib.Path) -> None:
    index = json.loads((complete / "mla_absorbed.safetensors.index.json").read_text())
    shards = sorted(complete.glob("*.safetensors"))
    assert [file.name for file in shards] == [
        f"mla_absorbed-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    everything = {}
    for file in shards:
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        everything |= tensors
    assert everything.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in everything.values())
    assert {path.name for path in complete.iterdir()} == {
        *(file.name for file in shards),
        "mla_absorbed.safetensors.index.json",
        "mla_manifest.json",
        "README.md",
    }


def test_what_was_written_is_read(complete: pathlib.Path) -> None:
    absorbed = AbsorbedCheckpoint.open(complete)
    stored = {name: tensor for file in complete.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(absorbed.names()) == set(stored)
    for name, tensor in stored.items():
        assert name in absorbed
        assert torch.equal(absorbed.read(name), tensor)
    layer = absorbed.layer_tensors(2)
    assert set(layer) == {"k_b", "ov"}
    assert torch.equal(layer["ov"], stored["model.layers.2.self_attn.ov_absorbed.weight"])
    assert (absorbed.layers[2].qk, absorbed.layers[2].vo) == ("factored", "fused")


def test_manifest_survives_its_own_text(complete: pathlib.Path) -> None:
    manifest = AbsorbedCheckpoint.open(complete).manifest
    text = (complete / "mla_manifest.json").read_text()
    assert manifest.to_json() == text
    assert storage.read_manifest(text.encode(), where="x") == manifest
    assert manifest.quantization is None and manifest.dtype == "bfloat16"
    assert str(complete.parent) not in text and "example" not in text


def test_an_open_checkpoint_can_be_pickled(complete: pathlib.Path) -> None:
    absorbed = pickle.loads(pickle.dumps(AbsorbedCheckpoint.open(complete)))
    assert torch.equal(absorbed.layer_tensors(0)["k_b"], AbsorbedCheckpoint.open(complete).layer_tensors(0)["k_b"])


def test_both_folders_open(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in snapshot(example_path).items():
        (source / name).write_bytes(data)
    convert(source, source)
    assert AbsorbedCheckpoint.open(source).path == source / "mla_absorbed"
    assert AbsorbedCheckpoint.open(source / "mla_absorbed").path == source / "mla_absorbed"


def first_shard(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("*.safetensors"))[0]


def edit_json(file: pathlib.Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_manifest(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:  # type: ignore[type-arg]
    return lambda folder: edit_json(folder / "mla_manifest.json", change)


def edit_index(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:  # type: ignore[type-arg]
    return lambda folder: edit_json(folder / "mla_absorbed.safetensors.index.json", change)


def edit_shard(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:  # type: ignore[type-arg]
    def spoil(folder: pathlib.Path) -> None:
        tensors = load_file(first_shard(folder))
        change(tensors)
        save_file(tensors, first_shard(folder), metadata={"format": "pt"})

    return spoil


K_B = "model.layers.0.self_attn.k_b_proj.weight"
SPOILED: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "no manifest": (lambda d: (d / "mla_manifest.json").unlink(), "holds no absorbed weights"),
    "no index": (lambda d: (d / "mla_absorbed.safetensors.index.json").unlink(), "index.json cannot be read"),
    "no shard": (lambda d: first_shard(d).unlink(), "00001-of-0.* cannot be read"),
    "cut shard": (lambda d: first_shard(d).write_bytes(first_shard(d).read_bytes()[:-2]), "cut short"),
    "cut header": (lambda d: first_shard(d).write_bytes(first_shard(d).read_bytes()[:20]), "cut short"),
    "empty shard": (lambda d: first_shard(d).write_bytes(b""), "cut short"),
    "tensor missing": (edit_shard(lambda t: t.pop(K_B)), rf"{K_B} \(.*\) is in .* and not in its file"),
    "wrong shape": (edit_shard(lambda t: t.update({K_B: t[K_B][1:].clone()})), r"bfloat16 \[255, 64\]; .* \[256, 64\]"),
    "wrong dtype": (edit_shard(lambda t: t.update({K_B: t[K_B].half()})), "is float16 .* says bfloat16"),
    "newer": (edit_manifest(lambda m: m.update(format_version=2, tool_version="9.1")), "version 2 .* 9.1.* update"),
    "version as text": (edit_manifest(lambda m: m.update(format_version="1")), "no int under 'format_version'"),
    "version true": (edit_manifest(lambda m: m.update(format_version=True)), "no int under 'format_version'"),
    "quantized": (edit_manifest(lambda m: m.update(quantization={"bits": 4})), "quantization that is not that of its"),
    "no layers": (edit_manifest(lambda m: m.pop("layers")), "no list under 'layers'"),
    "unknown form": (edit_manifest(lambda m: m["layers"][1]["forms"].update(qk="half")), "layer 1 has qk = 'half'"),
    "form of another": (edit_manifest(lambda m: m["layers"][1]["forms"].update(qk="fused")), "layer 1 lists tensors"),
    "no geometry key": (edit_manifest(lambda m: m["layers"][0]["geometry"].pop("scale")), "geometry .* instead of"),
    "bad geometry": (edit_manifest(lambda m: m["layers"][0]["geometry"].update(num_heads=0)), "num_heads = 0"),
    "shape of another": (edit_manifest(lambda m: m["layers"][0]["geometry"].update(num_heads=4)), "layer 0 lists"),
    "unknown dtype": (
        edit_manifest(lambda m: m["layers"][0]["tensors"]["k_b"].update(dtype="int3")),
        "dtype = 'int3'; known are bfloat16",
    ),
    "negative shape": (
        edit_manifest(lambda m: m["layers"][0]["tensors"]["k_b"].update(shape=[-1, 2])),
        r"has the shape \[-1, 2\]",
    ),
    "not an object": (lambda d: (d / "mla_manifest.json").write_text("[1]"), "holds a JSON list"),
    "half a manifest": (lambda d: (d / "mla_manifest.json").write_bytes(b'{"format_version": 1, '), "not valid JSON"),
    "not in the index": (edit_index(lambda i: i["weight_map"].pop(K_B)), f"{K_B} is in mla_manifest.json and not in"),
    "no weight map": (edit_index(lambda i: i.pop("weight_map")), "has no weight_map"),
    "outside": (
        edit_index(lambda i: i["weight_map"].update({K_B: "../x.safetensors"})),
        r"points to '\.\./x.safetensors', which is not a file beside it",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_damaged_weights_are_refused_when_opened(sidecar: pathlib.Path, case: str) -> None:
    spoil, message = SPOILED[case]
    AbsorbedCheckpoint.open(sidecar)
    spoil(sidecar)
    with pytest.raises(SidecarError, match=message):
        AbsorbedCheckpoint.open(sidecar)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_when_read(sidecar: pathlib.Path, value: float) -> None:
    edit_shard(lambda tensors: tensors[K_B].view(-1)[7:9].fill_(value))(sidecar)
    absorbed = AbsorbedCheckpoint.open(sidecar)
    with pytest.raises(SidecarError, match=f"{K_B} in .* has 2 NaN or infinite values"):
        absorbed.layer_tensors(0)
    absorbed.layer_tensors(3)


def test_a_shard_cut_after_opening_is_refused_when_read(sidecar: pathlib.Path) -> None:
    absorbed = AbsorbedCheckpoint.open(sidecar)
    first_shard(sidecar).write_bytes(first_shard(sidecar).read_bytes()[:5000])
    with pytest.raises(SidecarError, match="ends inside"):
        absorbed.layer_tensors(0)
    first_shard(sidecar).unlink()
    with pytest.raises(SidecarError, match="No such file"):
        absorbed.read(K_B)


def test_names_and_layers_that_are_not_there(complete: pathlib.Path) -> None:
    absorbed = AbsorbedCheckpoint.open(complete)
    with pytest.raises(SidecarError, match=f"has no tensor {K_B[:-1]}; did you mean {K_B}"):
        absorbed.read(K_B[:-1])
    with pytest.raises(SidecarError, match="has no layer 4; it has 0, 1, 2, 3"):
        absorbed.layer_tensors(4)


def test_folders_without_weights(tmp_path: pathlib.Path, example_path: pathlib.Path) -> None:
    with pytest.raises(SidecarError, match="is not a folder"):
        AbsorbedCheckpoint.open(tmp_path / "nowhere")
    with pytest.raises(SidecarError, match=r"holds no absorbed weights .*`mla-convert convert"):
        AbsorbedCheckpoint.open(example_path)


def test_the_source_in_other_layouts_belongs(
    example_path: pathlib.Path, native_path: pathlib.Path, complete: pathlib.Path
) -> None:
    absorbed = AbsorbedCheckpoint.open(complete)
    absorbed.check_source(Checkpoint.open(example_path))
    absorbed.check_source(Checkpoint.open(native_path))


def spoiled_source(
    source: pathlib.Path, target: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Checkpoint:
    """A copy of a source whose tensors ``change`` may edit, in one file."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return Checkpoint.open(target)


def flip(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Change the last bit of one number."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(kinds[tensors[name].element_size()]).view(-1)[3] ^= 1

    return change


ATTENTION = "model.layers.2.self_attn."


def test_one_changed_bit_does_not_belong(
    example_path: pathlib.Path, complete: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    absorbed = AbsorbedCheckpoint.open(complete)  # factored key side, fused value side
    for word in ("kv_b_proj", "o_proj"):
        changed = spoiled_source(example_path, tmp_path / word, flip(f"{ATTENTION}{word}.weight"))
        with pytest.raises(MismatchError, match=rf"layer 2: {ATTENTION}{word}.weight .* has other values \(sha256"):
            absorbed.check_source(changed)
    # q_b_proj is not part of a factored key side
    absorbed.check_source(spoiled_source(example_path, tmp_path / "q", flip(f"{ATTENTION}q_b_proj.weight")))


def test_fp8_codes_and_scales_are_held_apart(
    fp8_path: pathlib.Path, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    convert(fp8_path, tmp_path / "out")
    absorbed = AbsorbedCheckpoint.open(tmp_path / "out")
    absorbed.check_source(Checkpoint.open(fp8_path))
    name = f"{ATTENTION}kv_b_proj.weight"
    with pytest.raises(MismatchError, match="layer 2: .* has other values"):
        absorbed.check_source(spoiled_source(fp8_path, tmp_path / "codes", flip(name)))
    with pytest.raises(MismatchError, match="layer 2: .* has the codes .* and other scales"):
        absorbed.check_source(spoiled_source(fp8_path, tmp_path / "scales", flip(name + "_scale_inv")))
    with pytest.raises(MismatchError, match=r"layer 0: .* is bfloat16 .* made from float8_e4m3fn"):
        absorbed.check_source(Checkpoint.open(example_path))


def test_a_layer_from_another_place_does_not_belong(
    example_path: pathlib.Path, complete: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        first, second = (f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (1, 2))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    with pytest.raises(MismatchError, match="layer 1: "):
        AbsorbedCheckpoint.open(complete).check_source(spoiled_source(example_path, tmp_path / "swapped", swap))


def test_another_geometry_does_not_belong(
    example_path: pathlib.Path, complete: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    changed = spoiled_source(example_path, tmp_path / "source", lambda tensors: None)
    edit_json(changed.path / "config.json", lambda c: c["rope_parameters"].update(mscale_all_dim=0.5))
    absorbed = AbsorbedCheckpoint.open(complete)
    with pytest.raises(MismatchError, match="layer 0: .* differ in scale 0.187.* and 0.16"):
        absorbed.check_source(Checkpoint.open(changed.path))
    edit_json(changed.path / "config.json", lambda c: c.update(num_hidden_layers=3))
    absorbed.manifest = dataclasses.replace(absorbed.manifest)
    absorbed.layers = {index: layer for index, layer in absorbed.layers.items() if index < 3}
    with pytest.raises(MismatchError, match=r"layers 0 to 2 \(3\); .* has layers 0 to 3 \(4\)"):
        absorbed.check_source(Checkpoint.open(changed.path))
