"""Which backend runs: what the Triton kernel takes, what is refused, and what is said of the choice."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from typing import Any

import interpreter  # noqa: F401  # before the kernel
import models
import pytest
import torch
from decode_cases import Case, build
from test_decode import run
from torch.utils._python_dispatch import TorchDispatchMode

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.kernels import announcing, device, dispatch, projection, triton_decode
from mla_convert.patches.cache_formats import parse_cache
from mla_convert.patches.cache_rows import code_dtype

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_int4_is_left_to_pytorch() -> None:
    args = build(Case(codes="int4/token"))
    with pytest.raises(UsageError, match="int4"):
        run(args, backend="triton")
    assert dispatch.choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert dispatch.choose_backend("auto", torch.device("cpu")) == "torch"


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("int4", {"latent_dtype": torch.uint8}),
        ("float64", {"query_dtype": torch.float64}),
        ("33 scales per token", {"scales": 33}),
        ("older than compute capability 8.0", {}),
    ],
)
def test_what_the_kernel_does_not_take(what: str, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is PyTorch's by default, and an error that says so where Triton is asked for."""
    monkeypatch.setattr(dispatch, "too_old", lambda device: "older" in what)
    cuda = torch.device("cuda")
    assert dispatch.choose_backend("auto", cuda, **call) == "torch"
    assert dispatch.describe_backend("auto", cuda, **call).startswith("torch")
    with pytest.raises(UsageError, match=f"backend='triton' does not take .*{what}"):
        dispatch.choose_backend("triton", cuda, **call)


@pytest.mark.parametrize(("capability", "old"), [((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_gpus_that_triton_does_not_compile_for(
    capability: tuple[int, int], old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    assert not device.too_old(cuda)  # nothing is known of a GPU that is not there
    found = types.SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert device.too_old(cuda) == old and not device.too_old(torch.device("cpu"))
    chosen = "torch" if old else "triton"
    assert dispatch.choose_backend("auto", cuda) == chosen
    assert dispatch.choose_backend("auto", cuda, query_dtype=torch.float64) == "torch"


def test_calls_choose_by_what_they_are_given() -> None:
    """float64, and more groups than the kernel takes."""
    for args in (build(Case(dtype=torch.float64)), build(Case(latent=256, codes="int8/group"))):
        if args.latent_scale is not None:
            args = dataclasses.replace(args, latent_scale=args.latent_scale.repeat_interleave(16, -1))
        with pytest.raises(UsageError, match="does not take"):
            run(args, backend="triton")
        run(args)


def test_a_scale_of_the_cpu_is_filled_in_not_copied() -> None:
    """A graph cannot be captured across a copy from the CPU's ordinary memory."""
    args = build(Case(codes="int8/tensor"))
    query = args.q_latent.to("meta")
    there = dataclasses.replace(args, q_latent=query, latent_scale=torch.tensor(0.25))
    copied: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copied.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        scale, strides, width = triton_decode._scale_arguments(there)
    assert scale.device.type == "meta" and scale.dtype == torch.float32 and (strides, width) == ((0, 0, 0), 64)
    assert not any("copy" in str(function) for function in copied)


def test_what_runs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """In compiled code too, and of products with quantized weights."""
    announcing.announce.cache_clear()
    caplog.set_level("INFO")
    args = build(Case())

    def call(q_latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(args, q_latent=q_latent * 1, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for _ in range(2):
        compiled(args.q_latent)
    assert caplog.messages == ["absorbed decode on cpu: the triton backend"]
    for _ in range(2):
        run(args, backend="triton")
        run(args, backend="torch")
        projection.lift_query(torch.ones(1, 1, 2, 16), torch.ones(2, 16, 32), backend="torch")
    assert caplog.messages[1:] == [
        "absorbed decode on cpu: the torch backend",
        "per-head products on cpu: the torch backend",
    ]


def test_compiling_at_the_first_call_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """On GPUs, to whoever listens as the README says; elsewhere nothing is compiled."""
    announcing.announce.cache_clear()
    caplog.set_level("INFO", logger="mla_convert")
    for where, backend in (("cpu", "triton"), ("cuda", "torch"), ("cuda", "triton"), ("cuda", "triton")):
        announcing.announce("absorbed decode", backend, torch.device(where))
    announced = "absorbed decode: Triton compiles its kernel at the first call of each kind, which takes seconds"
    assert caplog.messages == [
        "absorbed decode on cpu: the triton backend",
        "absorbed decode on cuda: the torch backend",
        "absorbed decode on cuda: the triton backend",
        f"{announced}; handle.warmup() does it ahead",
    ]
    assert 'logging.getLogger("mla_convert").setLevel("INFO")' in README.read_text("utf-8")
    announcing.announce.cache_clear()


def test_a_patched_model_says_and_refuses_by_its_cache() -> None:
    model = models.deepseek_v3()
    with pytest.raises(UsageError, match="does not take latents in int4"):
        mla_convert.patch(model, backend="triton", cache="latent:int4")
    with pytest.raises(UsageError, match="does not take float64"):
        mla_convert.patch(model.double(), backend="triton")
    for cache, name in (
        ("latent:int4", "torch (PyTorch matrix products)"),
        ("latent:fp8", "triton"),
        ("dynamic", "triton"),
    ):
        assert dispatch.describe_backend("auto", torch.device("cuda"), code_dtype(parse_cache(cache))) == name


def test_forcing_triton_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_interpreted", lambda: False)
    with pytest.raises(UsageError, match="runs on CUDA and ROCm devices, found cpu"):
        dispatch.choose_backend("triton", torch.device("cpu"))
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(UsageError, match="needs the triton package"):
        dispatch.choose_backend("triton", torch.device("cuda"))
    assert dispatch.choose_backend("auto", torch.device("cuda")) == "torch"
