"""Warming up: what decoding compiles later has been compiled, by Triton's own rule of what makes a kernel anew."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import interpreter  # noqa: F401  # before the kernel
import models
import pytest
import torch
from transformers import AutoModelForCausalLM
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import mla_convert
from mla_convert import LatentCache
from mla_convert.kernels import projection_kernel, triton_decode
from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.warming import Kind, warm_up
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.cache_rows import RowLayout

HEADS, LATENT, ROPE, DTYPE = 128, 512, 64, torch.bfloat16


class Recorder:
    """Stands in for a kernel: keeps what Triton would tell its compilations apart by, and runs nothing."""

    def __init__(self, kernel: Any, keys: set[object]) -> None:
        self.kernel = JITFunction(kernel.fn, **kernel.kwargs)
        self.keys = keys

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.record

    def record(self, *args: Any, **values: Any) -> None:
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | values
        found: list[object] = [self.kernel.fn.__name__]
        for parameter in self.kernel.params:
            value = values.pop(parameter.name)
            if not parameter.is_constexpr:
                specialised = not parameter.do_not_specialize
                aligned = not parameter.do_not_specialize_on_alignment
                value = native_specialize_impl(CUDABackend, value, False, specialised, aligned)
            found.append((parameter.name, value))
        self.keys.add((*found, *values.items()))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """The kernels that calls on the meta device, taken for an H100, would compile."""
    found: set[object] = set()
    for name in ("part_kernel", "join_kernel"):
        monkeypatch.setattr(triton_decode, name, Recorder(getattr(triton_decode, name), found))
    monkeypatch.setattr(triton_decode, "device_arch", lambda device: "sm_90")
    return found


def store(form: str, tokens: int, room: int = 0, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """A history in a cache with ``room`` for more tokens."""
    layout = RowLayout(parse_format(form), LATENT, ROPE, DTYPE)
    rows = torch.empty(batch, tokens + room, layout.width, dtype=layout.stored_dtype, device="meta")[:, :tokens]
    return layout.codes(rows), layout.k_rope(rows), layout.scale(rows)


def step(form: str, tokens: int, new: int, *, masked: bool, lengths: bool, batch: int) -> DecodeArguments:
    """A step of generation at ``tokens`` cached ones, its cache grown as it happens to be."""
    latent, k_rope, scale = store(form, tokens, room=tokens * 7 % 129, batch=batch)
    query = torch.empty(batch, new, HEADS, LATENT + ROPE, dtype=DTYPE, device="meta")
    # Every other row of a longer one: a mask that was cut from another.
    mask = torch.empty(batch, new, tokens + 3, dtype=torch.bool, device="meta")[..., 3:]
    lens = torch.empty(batch + 1, dtype=torch.int64, device="meta")[1:]
    return DecodeArguments(
        query[..., :LATENT],
        query[..., LATENT:],
        latent,
        k_rope,
        0.1,
        kv_lens=lens if lengths else None,
        mask=mask if masked else None,
        latent_scale=scale,
    )


@pytest.mark.parametrize("form", ["model", "int8", "fp8:128", "flashmla"])
def test_no_step_compiles_anything_that_warming_up_has_not(form: str, keys: set[object]) -> None:
    """Every residue of the length by 16 and of the number of parts, whatever the capacity, batch and new tokens."""
    assert warm_up("triton", HEADS, lambda tokens: store(form, tokens)) == 8
    warmed = set(keys)
    lengths = sorted({*range(17, 8300, 13), *range(1015, 1050), *(2**n + 1 for n in range(4, 13))})
    for i, tokens in enumerate(lengths):
        batch = 1 + i % 3
        for new, masked, lens in ((1, False, False), (1, True, False), (1 + i % 4, True, True), (2, False, False)):
            triton_decode.decode(step(form, tokens, new, masked=masked, lengths=lens, batch=batch))
        assert keys == warmed, f"{tokens} tokens"


def test_a_choice_of_positions_is_warmed_too(keys: set[object]) -> None:
    warm_up("triton", HEADS, lambda tokens: store("model", tokens), (Kind(masked=True, chosen=2048),))
    warmed = set(keys)
    for tokens in (2049, 2051, 4096, 5000):
        args = step("model", tokens, 1, masked=True, lengths=False, batch=1)
        chosen = torch.empty(1, 1, 2048, dtype=torch.int64, device="meta")
        triton_decode.decode(DecodeArguments(**vars(args) | {"indices": chosen}))
    assert keys == warmed


def test_warming_runs_in_the_cache_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the model's own dims, in the format that was asked for; not at all where PyTorch computes."""
    launches: list[DecodeArguments] = []
    launch = triton_decode.launch
    monkeypatch.setattr(triton_decode, "launch", lambda args, tile: launches.append(args) or launch(args, tile))
    model = models.deepseek_v3()
    for cache, dtype in (("latent:int8", torch.int8), ("dynamic", torch.float32)):
        launches.clear()
        with mla_convert.patched(model, backend="triton", cache=cache) as handle:
            handle.warmup()
        split = triton_decode.tile_for(launches[0]).split_tokens
        forms = {(a.q_latent.shape[1], a.mask is not None, a.kv_lens is not None, a.kv_len > split) for a in launches}
        wanted = ((1, False, False), (1, True, False), (1, True, True), (2, False, False))
        assert forms == {(*form, several) for form in wanted for several in (False, True)}
        assert {(a.q_latent.shape[2], a.q_latent.shape[3], a.q_rope.shape[3]) for a in launches} == {(3, 40, 8)}
        assert {a.latent.dtype for a in launches} == {dtype} and {a.k_rope.dtype for a in launches} == {torch.float32}
    launches.clear()
    with mla_convert.patched(model, backend="torch") as handle:
        handle.warmup()
    assert not launches


@torch.inference_mode()
def test_products_with_codes_are_warmed_too(
    keys: set[object], monkeypatch: pytest.MonkeyPatch, example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The steps of a patched model, attention included, compile nothing; what they compute is not looked at here."""
    monkeypatch.setattr(projection_kernel, "project_heads", Recorder(projection_kernel.project_heads, keys))
    mla_convert.convert(example_path, tmp_path / "out", form="factored", quantize="int8")
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.bfloat16).eval()
    with mla_convert.patched(model, tmp_path / "out", backend="triton", prefill_threshold=70) as handle:
        handle.warmup()
        warmed = set(keys)
        assert {key[0] for key in warmed} == {"part_kernel", "join_kernel", "project_heads"}
        for batch, lengths in ((1, (40, 1, 1, 2, 60)), (3, (1, 20, 30, 1)), (2, (64, 1, 16))):
            cache = LatentCache(model.config)
            mask = torch.ones(batch, sum(lengths), dtype=torch.int64)
            mask[0, :3] = 0
            for i, new in enumerate(lengths):
                ids = torch.zeros(batch, new, dtype=torch.int64)
                model(ids, attention_mask=mask[:, : sum(lengths[: i + 1])] if batch > 1 else None, cache=cache)
    assert keys == warmed


def test_nothing_is_warmed_where_pytorch_computes() -> None:
    nibbles = torch.zeros(1, 1, LATENT // 2, dtype=torch.uint8)
    assert warm_up("auto", HEADS, lambda tokens: (nibbles, torch.zeros(1, 1, ROPE), torch.ones(1, 1))) == 0
    assert warm_up("torch", HEADS, lambda tokens: store("model", tokens)) == 0
