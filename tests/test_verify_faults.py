"""Faults that a verification has to catch, each planted where it would arise."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import mla_convert
from mla_convert import verification
from mla_convert.errors import MismatchError
from mla_convert.judgement import VerificationReport
from mla_convert.patches import seeing
from mla_convert.patches.layer import AbsorbedLayer, layer_of
from mla_convert.patches.loading import load_original
from mla_convert.patches.masks import Visibility
from mla_convert.storage import AbsorbedCheckpoint
from mla_convert.verification import verify

SMALL: dict[str, Any] = {"prefill": 16, "decode": 9, "batch": 3}
#: 4,096 positions in few calls, for the rule of lower precision.
WIDE: dict[str, Any] = {"prefill": 16, "decode": 16, "batch": 256}
#: Where attention runs in latent space; the prefills run expanded.
ABSORBED = ["decode", "decode by 3", "padded decode", "one sequence"]
RULES = pytest.mark.parametrize("rule", ["strict", pytest.param("floor", marks=pytest.mark.slow)])

Attend = Callable[..., Tensor]


@pytest.fixture(scope="module")
def model(example_path: Path) -> PreTrainedModel:
    return load_original(example_path, dtype=torch.float32)


@pytest.fixture
def check(model: PreTrainedModel, example_path: Path) -> Callable[[str], VerificationReport]:
    """Verify the example by one of the two rules."""

    def run(rule: str) -> VerificationReport:
        if rule == "strict":
            return verify(model, **SMALL)
        return verify(example_path, dtype="bfloat16", **WIDE)

    return run


def breaks_absorbed(rule: str, report: VerificationReport) -> bool:
    """Whether what runs absorbed fails, and nothing else.

    The few positions of one sequence say little of a distribution, and may pass the rule of lower precision.
    """
    found = broken(report)
    return found == ABSORBED or (rule == "floor" and found == ABSORBED[:-1])


def broken(report: VerificationReport) -> list[str]:
    """Names of the stages that failed; each has its reason among the failures."""
    names = [stage.name for stage in report.stages if not stage.passed]
    assert not report.passed or not names
    assert all(any(failure.startswith(f"{name}: ") for failure in report.failures) for name in names)
    return names


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Change what ``AbsorbedLayer.attend`` is given: (layer, query, latent, k_rope, scale) without the layer."""
    original: Attend = AbsorbedLayer.attend

    def attend(self: AbsorbedLayer, query: Tensor, latent: Tensor, k_rope: Tensor, scale: float, *rest: Any) -> Tensor:
        return original(self, *change(self, query, latent, k_rope, scale), *rest)

    monkeypatch.setattr(AbsorbedLayer, "attend", attend)


@RULES
def test_a_missing_mscale(
    rule: str, check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_mscale(layer: AbsorbedLayer, q: Tensor, c: Tensor, k: Tensor, scale: float) -> tuple[Any, ...]:
        plain = layer.geometry.qk_head_dim**-0.5
        assert scale == pytest.approx(layer.geometry.scale) and scale > 1.2 * plain
        return q, c, k, plain

    plant(monkeypatch, without_mscale)
    assert breaks_absorbed(rule, check(rule))


@RULES
def test_the_rotary_half_dropped(
    rule: str, check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda _layer, q, c, k, scale: (q, c, torch.zeros_like(k), scale))
    assert breaks_absorbed(rule, check(rule))


@pytest.mark.parametrize(
    ("rule", "lift"),
    [
        ("strict", "lift_query"),
        ("strict", "lift_output"),
        pytest.param("floor", "lift_output", marks=pytest.mark.slow),
    ],
)
def test_heads_permuted(
    rule: str, lift: str, check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Attend = getattr(AbsorbedLayer, lift)
    monkeypatch.setattr(AbsorbedLayer, lift, lambda self, x: original(self, x).roll(1, dims=2))
    assert breaks_absorbed(rule, check(rule))


@RULES
def test_a_mask_ignored(rule: str, check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch) -> None:
    def all_visible(_mask: Any, _batch: int, _q_len: int, kv_len: int, **_: Any) -> Visibility:
        return Visibility(kv_len)

    monkeypatch.setattr(seeing, "visibility", all_visible)
    assert broken(check(rule)) == ["padded decode"]


def test_a_causal_limit_off_by_one(check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks of several tokens can confuse their causal limits."""
    original: Any = seeing.visibility

    def shifted(mask: Any, batch: int, q_len: int, kv_len: int, **kw: Any) -> Visibility:
        seen = original(mask, batch, q_len, kv_len, **kw)
        if q_len == 1:
            return seen  # type: ignore[no-any-return]
        return Visibility(kv_len, kv_lens=torch.full((batch,), kv_len + 1))

    monkeypatch.setattr(seeing, "visibility", shifted)
    assert broken(check("strict")) == ["decode by 3"]


def test_what_never_runs_is_not_verified(
    check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsorbedLayer, "prefers_absorbed", lambda *_: False)
    report = check("strict")
    assert broken(report) == ["decode", "padded prefill", "padded decode", "one sequence"]
    assert all("attention never ran absorbed in model.layers.0" in failure for failure in report.failures)
    assert all(stage.absorbed_calls == 0 for stage in report.stages)


def test_one_layer_that_never_runs_absorbed(
    check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AbsorbedLayer.prefers_absorbed
    monkeypatch.setattr(
        AbsorbedLayer, "prefers_absorbed", lambda self, *rest: "layers.2" not in self.name and original(self, *rest)
    )
    report = check("strict")
    assert "model.layers.2.self_attn" in report.failures[0] and "layers.1" not in report.failures[0]


def test_what_is_not_a_number(check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda _layer, q, c, k, scale: (q * float("nan"), c, k, scale))
    report = check("strict")
    assert broken(report) == ABSORBED
    assert report.to_dict()["stages"][1]["patched"]["largest_relative"] is None


def test_a_cache_that_loses_a_token(
    check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(_layer: Any, q: Tensor, c: Tensor, k: Tensor, scale: float) -> tuple[Any, ...]:
        return q, torch.cat((c[:, 1:2], c[:, 1:]), dim=1), k, scale

    plant(monkeypatch, forgetful)
    assert set(broken(check("strict"))) >= {"decode", "decode by 3", "one sequence"}


def damage(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[AbsorbedLayer]], None]) -> None:
    """Change absorbed weights in memory right after patching."""
    original: Any = verification.patched

    @contextlib.contextmanager
    def patched(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(model, *args, **kwargs) as handle:
            change([layer for module in model.modules() if (layer := layer_of(module))])
            yield handle

    monkeypatch.setattr(verification, "patched", patched)


def test_a_wrong_scale_on_one_block_in_memory(
    check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_block(layers: list[AbsorbedLayer]) -> None:
        layers[3].w_uv[:2] *= 1.02  # as much as half a block of 128 × 128 covers of it

    damage(monkeypatch, one_block)
    assert broken(check("strict")) == ABSORBED


@pytest.mark.parametrize("name", ["w_uk_t", "w_uv"])
def test_two_layers_swapped_in_memory(
    name: str, check: Callable[[str], VerificationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(layers: list[AbsorbedLayer]) -> None:
        first, second = getattr(layers[1], name), getattr(layers[2], name)
        setattr(layers[1], name, second)
        setattr(layers[2], name, first)

    damage(monkeypatch, swap)
    assert broken(check("strict")) == ABSORBED


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Rewrite the one file of absorbed weights in ``folder``."""
    (file,) = folder.glob("*.safetensors")
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_one_layers_weights_taken_from_another(
    form: str, model: PreTrainedModel, example_path: Path, tmp_path: Path
) -> None:
    """The manifest is true to the model, the file's contents are not: patching notices, or the logits do."""
    mla_convert.convert(example_path, tmp_path / "out", form=form, dtype="float32")

    def take(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        other = {name: tensors[name.replace("layers.1.", "layers.2.")].clone() for name in tensors}
        return {name: other[name] if "layers.1." in name else tensors[name] for name in tensors}

    assert verify(example_path, tmp_path / "out", **SMALL).passed
    edit(tmp_path / "out", take)
    for subject in (example_path, model):
        try:
            report = verify(subject, tmp_path / "out", **SMALL)
        except MismatchError as refused:
            assert "layer 1" in str(refused)
        else:
            assert broken(report) == ABSORBED


@pytest.fixture(scope="module")
def scaled_fp8_path(fp8_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The FP8 example with the scale of one block of one ``kv_b_proj`` 2 % too large."""
    folder = tmp_path_factory.mktemp("scaled") / "source"
    shutil.copytree(fp8_path, folder)
    name = "model.layers.2.self_attn.kv_b_proj.weight_scale_inv"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][1, 0] *= 1.02
            save_file(tensors, file, metadata={"format": "pt"})
    assert not torch.equal(variants.load_all(folder)[name], variants.load_all(fp8_path)[name])
    return folder


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_a_wrong_scale_on_one_fp8_block(form: str, fp8_path: Path, scaled_fp8_path: Path, tmp_path: Path) -> None:
    mla_convert.convert(scaled_fp8_path, tmp_path / "out", form=form)
    with pytest.raises(MismatchError, match=r"layer 2: .*kv_b_proj.weight .* and other scales"):
        verify(fp8_path, tmp_path / "out")
    in_memory = load_original(fp8_path, dtype=torch.float32)
    with pytest.raises(MismatchError, match="layer 2: .*relative error"):
        verify(in_memory, tmp_path / "out")
    assert not hasattr(in_memory, "_mla_patch")


def test_weights_of_another_checkpoint(example_path: Path, fp8_path: Path, tmp_path: Path) -> None:
    mla_convert.convert(fp8_path, tmp_path / "out")
    with pytest.raises(MismatchError, match="belong to another checkpoint"):
        verify(example_path, tmp_path / "out", **SMALL)


def test_a_changed_bit_in_stored_weights(example_path: Path, tmp_path: Path) -> None:
    """Bits that no hash covers are found by the logits, unless patching refuses them."""
    mla_convert.convert(example_path, tmp_path / "out", form="factored")

    def flip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.3.self_attn.v_b_proj.weight"
        tensors[name].view(torch.int16)[5, 7] ^= 1 << 9  # an exponent bit
        return tensors

    edit(tmp_path / "out", flip)
    assert AbsorbedCheckpoint.open(tmp_path / "out").layers
    try:
        report = verify(example_path, tmp_path / "out", **SMALL)
    except MismatchError as refused:
        assert "layer 3" in str(refused)
    else:
        assert set(broken(report)) <= set(ABSORBED) and not report.passed
