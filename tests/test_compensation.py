"""Codes chosen by what a weight meets: losses by their definition, and what is kept."""

from __future__ import annotations

import concurrent.futures
import pathlib
import threading
import time

import pytest
import torch
from torch import Tensor

import mla_convert
from mla_convert import quality
from mla_convert.calibration import RUN, Calibration, collect, shared_windows
from mla_convert.checkpoint import Checkpoint
from mla_convert.compensation import Chooser, Moments, compensate, search_scales
from mla_convert.errors import UsageError
from mla_convert.geometry import MLAGeometry
from mla_convert.patches.loading import load_original
from mla_convert.quantization import encode, expand, find_scales, quantize
from mla_convert.schemes import FP8_BLOCKS, INT8, Scheme, int4

G = MLAGeometry(40, 3, 64, 32, 16, 24, 48, 0.1)
SHAPES = {"k_b": (96, 64), "v_b": (72, 64), "qk": (240, 48), "ov": (40, 192)}


def moment(heads: int, k: int, generator: torch.Generator) -> Tensor:
    """Inputs in which a few directions carry nearly everything."""
    mixing = torch.randn(heads, k, k, generator=generator) * torch.logspace(0, -2, k)
    return mixing @ mixing.transpose(1, 2)


def moments(seed: int) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (3, 32), "latent": (1, 64), "output": (3, 64), "rank": (1, 48)}
    made = {name: moment(heads, k, generator) for name, (heads, k) in shapes.items()}
    return Moments(made["query"], made["latent"][0], made["output"], made["rank"][0])


def weight(key: str) -> Tensor:
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(5))


def by_definition(key: str, delta: Tensor, m: Moments) -> float:
    """Expected square of what a change does, head by head."""
    if key == "qk":
        return float(torch.einsum("oi,ij,oj->", delta, m.rank, delta))
    heads = delta.view(40, 3, 64).transpose(0, 1) if key == "ov" else delta.view(3, -1, 64)
    if key == "k_b":
        return float(torch.einsum("hnc,hnm,cd,hmd->", heads, m.query, m.latent, heads))
    return float(torch.einsum("hoc,hcd,hod->", heads, m.output, heads))


@pytest.mark.parametrize("key", SHAPES)
def test_losses_by_their_definition(key: str) -> None:
    m = moments(1)
    assert Chooser(G, moments(0), m).loss(key, weight(key)) == pytest.approx(
        by_definition(key, weight(key), m), rel=1e-4
    )


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("scheme", [int4(16), INT8, FP8_BLOCKS], ids=str)
def test_compensation_beats_nearest_for_the_inputs_it_knows(key: str, scheme: Scheme) -> None:
    m = moments(0)
    chooser, w = Chooser(G, m, m), weight(key)
    nearest = by_definition(key, quantize(w, scheme).dequantize() - w, m)
    coded, name = chooser.choose(key, w, scheme)
    found = by_definition(key, coded.dequantize() - w, m)
    assert name != "nearest" and found < 0.9 * nearest
    for other, candidate in chooser.candidates(key, w, scheme):
        assert by_definition(key, candidate.dequantize() - w, m) >= found * (1 - 1e-4), other


def test_compensation_one_column_after_the_other() -> None:
    """Two inputs, nearly the same: the second column takes what the first one lost."""
    w, scales = torch.tensor([[[0.4, 0.4]]]), torch.ones(1, 1, 1)
    moment = torch.tensor([[[1.0, 0.999], [0.999, 1.0]]])
    assert compensate(w, moment, scales, INT8).tolist() == [[[0.0, 1.0]]]  # 0.4 + 0.4 is nearer to 1 than to 0
    assert compensate(w, torch.eye(2)[None], scales, INT8).tolist() == [[[0.0, 0.0]]]


def test_inputs_that_never_occur_change_nothing() -> None:
    w = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    scales = find_scales(w[0], INT8)[None]
    assert torch.equal(compensate(w, torch.zeros(1, 16, 16), scales, INT8), (w / scales).round().clamp(-128, 127))


@pytest.mark.parametrize("scheme", [int4(16), INT8, FP8_BLOCKS], ids=str)
def test_searched_scales_err_less_where_it_matters(scheme: Scheme) -> None:
    w = weight("v_b")
    w[:, ::16] *= 4  # one large element in each group, and one that hardly counts
    importance = torch.ones(64)
    importance[::16] = 1e-3
    scales = search_scales(w, scheme, importance)
    assert scales.shape == find_scales(w, scheme).shape

    def error(scales: Tensor) -> float:
        return float(((quantize(w, scheme, scales).dequantize() - w).square() * importance).sum())

    assert error(scales) < error(find_scales(w, scheme))
    coded = encode(w / expand(scales, scheme, (72, 64)), scales, scheme)
    assert torch.equal(coded.codes, quantize(w, scheme, scales).codes)


def test_nearest_is_kept_where_the_judging_half_says_so() -> None:
    """Inputs of the judging half that have nothing to do with those that chose."""
    fit, judge = moments(0), moments(1)
    judge = Moments(
        *(torch.eye(m.shape[-1]).expand(m.shape) for m in (judge.query, judge.latent, judge.output, judge.rank))
    )
    for key in ("v_b", "qk", "ov"):
        w = weight(key)
        coded, name = Chooser(G, fit, judge).choose(key, w, INT8)
        assert name == "nearest" and torch.equal(coded.codes, quantize(w, INT8).codes)


def test_windows_share_a_passage_or_not() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randint(1000, (3, 256), generator=generator)
    ours = torch.randint(1000, (4, 256), generator=generator)
    assert shared_windows(ours, theirs) == 0
    ours[1, 100 : 100 + RUN - 1] = theirs[2, 7 : 7 + RUN - 1]
    assert shared_windows(ours, theirs) == 0  # one token short
    ours[1, 100 : 100 + RUN] = theirs[2, 7 : 7 + RUN]
    ours[3] = theirs[0]
    assert shared_windows(ours, theirs) == 2


@torch.no_grad()
def test_moments_are_those_of_the_model(example_path: pathlib.Path) -> None:
    """Against the model's own attention module, computed here from its hidden states."""
    model = load_original(example_path, dtype=torch.float32)
    ids = torch.randint(3, 1000, (3, 20), generator=torch.Generator().manual_seed(0))
    module = model.model.layers[1].self_attn
    seen: list[Tensor] = []
    hooks = [
        module.q_b_proj.register_forward_hook(lambda _m, given, out: seen.extend((given[0], out))),
        module.kv_a_layernorm.register_forward_hook(lambda _m, _a, out: seen.append(out)),
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = collect(model, ids)
    assert set(found) == {0, 1, 2, 3}
    geometry, m = found[1]
    rank, query, latent = (each.flatten(0, 1).double() for each in seen)
    queries = query.view(60, 8, 48)[..., :32]
    assert geometry.num_heads == 8
    expected = {
        "rank": rank.T @ rank / 60,
        "query": torch.einsum("thn,thm->hnm", queries, queries) / 60,
        "latent": (latent - latent.mean(0)).T @ (latent - latent.mean(0)) / 60,
    }
    for name, value in expected.items():
        assert torch.allclose(getattr(m, name).double(), value, rtol=1e-4, atol=1e-4 * float(value.abs().max())), name
    # The first token attends to itself alone; an average of latents has at most their own square.
    assert m.output.shape == (8, 64, 64)
    assert (m.output.diagonal(dim1=1, dim2=2).sum(1) <= latent.square().sum(1).mean() * (1 + 1e-4)).all()


@pytest.mark.slow
def test_calibrated_conversion(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MOST", 6)
    text = (example_path / "held_out.txt").read_text()
    (tmp_path / "text.txt").write_text(text[60000:68000])
    options = {"form": "factored", "quantize": "int4"}
    report = mla_convert.convert(example_path, tmp_path / "a", calibrate=tmp_path / "text.txt", **options)
    plain = mla_convert.convert(example_path, tmp_path / "b", measure=True, **options)
    assert report.quality is not None and plain.quality is not None
    assert report.quality.absorbed.median_kl < plain.quality.absorbed.median_kl
    assert report.quality.unabsorbed == plain.quality.unabsorbed
    assert {tensor.rounding for tensor in plain.tensors} == {"nearest"}
    assert any(tensor.rounding.startswith("compensated") for tensor in report.tensors)
    # The same rows in the same groups: unabsorbed is the same model.
    assert plain.quality.absorbed.mean_kl == pytest.approx(plain.quality.unabsorbed.mean_kl, rel=0.05)
    assert [change.layer for change in plain.quality.layers] == [0, 1, 2, 3]
    assert all(0 < change.relative_change < 0.3 for change in plain.quality.layers)


def test_a_model_that_cannot_be_run_is_run_once(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for the codes of other layers get the same error, and do not try for themselves."""
    (tmp_path / "text.txt").write_text((example_path / "held_out.txt").read_text()[60000:68000])
    calibration = Calibration(Checkpoint.open(example_path), tmp_path / "text.txt")
    calls: list[int] = []
    waiting = threading.Barrier(4)

    def run(self: Calibration) -> None:
        calls.append(1)
        time.sleep(0.05)
        raise MemoryError("no room for the model")

    def ask(index: int) -> None:
        waiting.wait()
        calibration(index, "k_b", torch.ones(4, 32), INT8)

    monkeypatch.setattr(Calibration, "_run", run)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(ask, index).exception for index in range(4)]
    assert [type(exception()) for exception in found] == [MemoryError] * 4 and calls == [1]


def test_texts_that_cannot_be(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(example_path)
    text = (example_path / "held_out.txt").read_text()
    reported = 32 * 256 * 4  # characters that may be reported on: tokens of the windows, four characters each at most
    for name, copy in {
        "copy": text,
        "moved": "Another beginning. " + text[333:9000],
        "last": text[reported:] + text[1000:2000],
    }.items():
        (tmp_path / name).write_text(copy)
        with pytest.raises(
            UsageError, match=r"windows of .* have 64 tokens in a row or more in common with the held-out"
        ):
            Calibration(checkpoint, tmp_path / name)
    with pytest.raises(UsageError, match="in common with the held-out text of .*held_out.txt"):
        Calibration(checkpoint, example_path / "held_out.txt")
    (tmp_path / "other.txt").write_text(text[reported:])
    assert "calibrated on" in Calibration(checkpoint, tmp_path / "other.txt").description
    (tmp_path / "short.txt").write_text((example_path / "held_out.txt").read_text()[:400])
    with pytest.raises(UsageError, match="less than two windows|one window has"):
        Calibration(checkpoint, tmp_path / "short.txt")
