"""Caches of every format in patched models, in files, with another model, and at their capacity."""

from __future__ import annotations

import pathlib
from typing import Any

import family_models
import models
import older
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import mla_convert
from mla_convert.errors import CheckpointError, MismatchError, PatchError, UsageError
from mla_convert.kernels import torch_decode
from mla_convert.patches import cache_files, versions
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.latent_layer import LatentLayer


@torch.inference_mode()
def decoded(model: Any, ids: torch.Tensor, cache: Any, sizes: list[int]) -> torch.Tensor:
    """Logits of ``ids`` fed in pieces."""
    outs, at = [], 0
    for size in sizes:
        outs.append(model(ids[:, at : at + size], cache=cache, use_cache=True).logits)
        at += size
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize(("form", "fused"), [("int8", False), ("int4:10", True), ("fp8:20", False)])
def test_absorbed_and_expanded_see_the_same_numbers(form: str, fused: bool) -> None:
    """The unpatched model with the same cache reads the numbers back: logits agree as in the model's dtype, 1e-4."""
    model, ids = models.deepseek_v3(), models.tokens(2, 24)
    sizes = [12, 1, 3, 8]
    expected = decoded(model, ids, mla_convert.LatentCache(model.config, format=form), sizes)
    with mla_convert.patched(model, form="fused" if fused else "factored", prefill_threshold=4):
        found = decoded(model, ids, mla_convert.LatentCache(model.config, format=form), sizes)
    assert models.relative(found, expected) <= 1e-4
    plain = decoded(model, ids, DynamicCache(), sizes)
    assert models.relative(found, plain) > 1e-4  # the codes were used


@torch.inference_mode()
def test_the_choice_in_patch_reaches_generate() -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    with mla_convert.patched(model, cache="latent:int8") as handle:
        assert handle.describe().cache == "latent:int8"
        out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, pad_token_id=2)
    assert all(isinstance(layer, LatentLayer) for layer in out.cache.layers)
    assert {str(layer.form) for layer in out.cache.layers} == {"int8"}
    by_hand = mla_convert.LatentCache(model.config, format="int8")
    with mla_convert.patched(model):
        again = model.generate(ids, max_new_tokens=6, do_sample=False, cache=by_hand, pad_token_id=2)
    assert torch.equal(out.sequences, again)


@torch.inference_mode()
def test_decoding_reads_codes_and_everything_else_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absorbed call makes no numbers in the cache; after it, and after an error, the layer gives numbers again."""
    model, ids = models.deepseek_v3(), models.tokens(1, 12)
    cache = mla_convert.LatentCache(model.config, format="int8")
    with mla_convert.patched(model):
        model(ids, cache=cache)
        layer: Any = cache.layers[0]
        with monkeypatch.context() as patching:
            patching.setattr(type(layer), "keys", property(lambda self: pytest.fail("numbers were made")))
            model(ids[:, :1], cache=cache)
            patching.setattr(torch_decode, "decode_latent", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, :1], cache=cache)
    keys, _ = layer.update(torch.zeros(1, 1, 1, 40), torch.zeros(1, 1, 1, 8))
    assert keys.dtype == torch.float32 and keys.shape == (1, 1, 15, 40)


def test_gradients_pass_to_the_new_tokens_as_if_not_rounded() -> None:
    layer = LatentLayer(parse_format("int8"))
    with torch.no_grad():
        layer.update(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4))
    keys, values = (torch.randn(1, 1, 2, n, requires_grad=True) for n in (8, 4))
    found = layer.update(keys, values)
    (found[0].sum() * 2 + found[1].square().sum()).backward()
    assert torch.equal(keys.grad, torch.full_like(keys, 2.0)) and torch.equal(values.grad, 2 * values.detach())  # type: ignore[arg-type]
    assert torch.equal(found[0].detach(), layer.keys)  # type: ignore[arg-type]


@torch.inference_mode()
@pytest.mark.parametrize("form", ["model", "int4:10"])
def test_a_saved_cache_goes_on(form: str, tmp_path: pathlib.Path) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    with mla_convert.patched(model):
        cache = mla_convert.LatentCache(model.config, format=form)
        model(ids, cache=cache)
        cache.save(tmp_path / "prefix.safetensors")
        loaded = mla_convert.LatentCache.load(tmp_path / "prefix.safetensors", model.config)
        expected, found = (model(ids[:, :1], cache=c).logits for c in (cache, loaded))
    assert torch.equal(found, expected) and loaded.format == cache.format
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.safetensors"]
    with pytest.raises(UsageError, match="nothing is overwritten"):
        cache.save(tmp_path / "prefix.safetensors")


def saved(tmp_path: pathlib.Path, form: str = "int8") -> pathlib.Path:
    cache = mla_convert.LatentCache(format=form)
    cache.update(torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 4), 0)
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def test_refuses_files_that_are_damaged_or_something_else(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    (cut := tmp_path / "cut").write_bytes(content[:-7])
    (edited := tmp_path / "edited").write_bytes(content.replace(b"int8", b"int9"))
    save_file(load_file(path), other := tmp_path / "other")
    (tmp_path / "version").write_bytes(content.replace(b'version\\": 1', b'version\\": 7'))
    for damaged, words in [
        (cut, "cannot be read"),
        (edited, "do not describe"),
        (other, "no saved LatentCache"),
        (tmp_path / "version", "version 7"),
        (tmp_path / "missing", "cannot be read"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            mla_convert.LatentCache.load(damaged)


def test_refuses_a_file_of_another_model(tmp_path: pathlib.Path) -> None:
    path, config = saved(tmp_path), models.deepseek_v3().config
    with pytest.raises(MismatchError, match="1 layers, the model has 2"):
        mla_convert.LatentCache.load(path, config)
    config = models.deepseek_v3(num_hidden_layers=1).config
    with pytest.raises(MismatchError, match="C, R"):
        mla_convert.LatentCache.load(path, config)
    with pytest.raises(UsageError, match="more than the capacity"):
        mla_convert.LatentCache.load(path, capacity=4)
    with pytest.raises(UsageError, match="device='cudaa' cannot be used here"):
        mla_convert.LatentCache.load(path, device="cudaa")


def test_refuses_to_save_where_nothing_can_be(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, a file in its place, a name that is too long, a disk that fails: one error of ours, nothing left."""
    cache = mla_convert.LatentCache()
    cache.update(torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 4), 0)
    (tmp_path / "file").write_text("mine")
    for place, words in (
        (tmp_path / "missing" / "cache", "there is no folder"),
        (tmp_path / "file" / "cache", "there is no folder"),
        (tmp_path / ("x" * 300), "cannot be written"),
        (tmp_path, "nothing is overwritten"),
        ("", "no path"),
    ):
        with pytest.raises(UsageError, match=words):
            cache.save(place)

    def failing(_tensors: Any, place: pathlib.Path, _metadata: Any) -> None:
        place.write_text("half")
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(cache_files, "save_file", failing)
    with pytest.raises(UsageError, match=r"cannot be written \(no space left"):
        cache.save(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_refuses_to_save_layers_of_other_kinds(tmp_path: pathlib.Path) -> None:
    cache = mla_convert.LatentCache()
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    with pytest.raises(UsageError, match="DynamicSlidingWindowLayer"):
        cache.save(tmp_path / "cache")


@torch.inference_mode()
def test_refuses_a_cache_of_another_model() -> None:
    model = models.deepseek_v3()
    wider = models.deepseek_v3(kv_lora_rank=32)
    deeper = models.deepseek_v3(num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"\(40, 8\).*\(32, 8\)"):
        wider(models.tokens(1, 3), cache=mla_convert.LatentCache(model.config))
    with pytest.raises(UsageError, match="of 2 layers, and layer 2"):
        deeper(models.tokens(1, 3), cache=mla_convert.LatentCache(model.config))
    shallower = models.deepseek_v3(num_hidden_layers=1)
    with mla_convert.patched(shallower), pytest.raises(UsageError, match="of 2 layers, and the model has 1"):
        shallower(models.tokens(1, 3), cache=mla_convert.LatentCache(model.config))


def test_refuses_codes_that_no_layer_would_hold() -> None:
    model = family_models.make("deepseek_v32")
    with pytest.raises(UsageError, match="DynamicIndexedLayer"):
        mla_convert.LatentCache(model.config, format="int8")
    with pytest.raises(UsageError, match="DynamicIndexedLayer"):
        mla_convert.patch(model, cache="latent:int8")
    if older.RELEASE >= versions.SPARSE:
        mla_convert.patch(model)
    else:  # such models are not patched at all
        with pytest.raises(PatchError, match="DSA"):
            mla_convert.patch(model)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["model", "int8"])
def test_a_fixed_capacity_is_allocated_once_and_never_passed(form: str) -> None:
    layer = LatentLayer(parse_format(form), capacity=8)
    for count in (5, 2, 1):
        layer.update(torch.randn(1, 1, count, 4), torch.randn(1, 1, count, 2))
        assert layer.rows is not None and layer.rows.shape[1] == layer.get_max_length() == 8
    with pytest.raises(UsageError, match="holds 8 of 8 tokens.*given 1 more"):
        layer.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 2))
    assert layer.get_seq_length() == 8


@pytest.mark.parametrize("capacity", [0, -1, True, 2.5])
def test_refuses_capacities_that_are_none(capacity: Any) -> None:
    with pytest.raises(UsageError, match="capacity"):
        mla_convert.LatentCache(capacity=capacity)


@pytest.mark.parametrize(("form", "row"), [("model", 48 * 4), ("int8", 48 + 16 + 32), ("int4:10", 32 + 16 + 32)])
def test_stored_bytes_are_those_of_the_rows(form: str, row: int) -> None:
    """C = 40, R = 8 in float32; each part of a coded row begins at a multiple of 16 bytes."""
    cache = mla_convert.LatentCache(format=form)
    for index in range(3):
        cache.update(torch.randn(2, 1, 5, 40), torch.randn(2, 1, 5, 8), index)
    assert cache.stored_bytes == 3 * 2 * 5 * row


def test_refuses_groups_that_do_not_fit_the_model() -> None:
    """When the cache is made, or the model patched, and not at the first step."""
    model = models.deepseek_v3()
    with pytest.raises(UsageError, match="40 numbers has no whole groups of 32"):
        mla_convert.LatentCache(model.config, format="int8:32")
    with pytest.raises(UsageError, match="40 numbers has no whole groups of 32"):
        mla_convert.patch(model, cache="latent:int8:32")
    with pytest.raises(UsageError, match="FlashMLA's row"):
        mla_convert.patch(model, cache="latent:flashmla")
    assert mla_convert.LatentCache(format="int8:32").format.group == 32  # without a config, the first tokens tell


@torch.inference_mode()
def test_refuses_to_offload_what_is_on_the_cpu() -> None:
    model = models.deepseek_v3()
    with mla_convert.patched(model), pytest.raises(UsageError, match="leave offloading out"):
        model(models.tokens(1, 4), cache=mla_convert.LatentCache(model.config, offloading=True))


def test_a_file_asks_for_a_capacity_as_a_new_cache_does(tmp_path: pathlib.Path) -> None:
    mla_convert.LatentCache(models.deepseek_v3().config).save(tmp_path / "cache")
    for capacity in (0, 1.5, "8", True):
        with pytest.raises(UsageError, match="capacity is a number of tokens from 1"):
            mla_convert.LatentCache.load(tmp_path / "cache", capacity=capacity)  # type: ignore[arg-type]
