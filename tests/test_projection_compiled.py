"""The kernel of the per-head products, compiled ahead of time for every target: limits, spills, instructions, loads."""

from __future__ import annotations

import aot
import pytest
import torch
from projection_cases import FORMS
from torch import Tensor

from mla_convert.kernels import projection
from mla_convert.kernels.packed import KINDS, PackedWeight
from mla_convert.kernels.tiles import SHARED_LIMIT

#: The prefix of the matrix instruction that each target must use at 16 bits.
MATRIX = {"sm_90": "HGMMA", "sm_100": "UTC", "gfx942": "v_mfma", "gfx950": "v_mfma"}
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def request(
    target: str, side: str, form: str, rows: int, dtype: str = "bf16", stored: int = 128, latent: int = 512
) -> aot.Request:
    """The kernel as a launch on contiguous tensors of 128 heads specialises it."""
    over_rows = side == "query"
    x = torch.empty(rows, 1, 128, stored if over_rows else latent, dtype=TORCH[dtype], device="meta")
    weight: Tensor | PackedWeight = torch.empty(128, stored, latent, dtype=TORCH[dtype], device="meta")
    codes, by_row = dtype, False
    if form != "plain":
        kind, (down, across) = FORMS[form]
        held, per_element = KINDS[kind]
        block = (down, min(across, latent))
        codes, by_row = "i8" if held == torch.int8 else "u8", block[1] == latent
        weight = PackedWeight(
            torch.empty(128 * stored, latent // per_element, dtype=held, device="meta"),
            torch.empty(-(-128 * stored // block[0]), -(-latent // block[1]), device="meta"),
            kind,
            block,
        )
    constants = projection.constants_of(target, x, weight, stored, latent, over_rows)
    options = {name: constants.pop(name) for name in [*constants] if name.startswith(("num_", "matrix_"))}
    strides = ["stride_xb", "stride_xs", "stride_xh", "stride_wh", "stride_wr", "stride_om", "stride_oh"]
    ones = ["stride_xk", "stride_wc", "stride_sc", *(["stride_sr"] if by_row else [])]
    wide = strides + ([] if by_row or form == "fp8/128x128" else ["stride_sr"])
    pointers = {"x": f"*{dtype}", "codes": f"*{codes}", "scales": "*fp32", "out": f"*{dtype}"}
    integers = dict.fromkeys(["rows", "q_len", *strides, *([] if by_row else ["stride_sr"])], "i32")
    return aot.Request(
        module="mla_convert.kernels.projection_kernel",
        function="project_heads",
        target=target,
        signature=pointers | integers,
        constants=constants | dict.fromkeys(ones, 1),
        divisible=(*pointers, *wide),
        options=options,
    )


def check_compiled(asked: aot.Request, built: aot.Compiled) -> None:
    assert built.shared <= SHARED_LIMIT[asked.target], (asked, built)
    # A register or two may be put aside before the loop and taken back behind it.
    assert built.tensor_memory <= 512 and built.spills <= 16 and built.loop_spills == 0, (asked, built)
    assert not built.narrow_loads, (asked, built)
    if asked.signature["x"] != "*fp32":
        assert built.wide_loads, (asked, built)
        wanted = MATRIX.get(asked.target, "HMMA")
        assert built.matrix and all(name.startswith(wanted) for name in built.matrix), (asked, built)


#: One kernel for each target, chosen so that each side and each kind is among them.
QUICK = [
    ("sm_80", "query", "fp8/128x128", 16),
    ("sm_86", "output", "int4/128", 16),
    ("sm_89", "query", "fp8/row", 64),
    ("sm_90", "output", "plain", 64),
    ("sm_100", "output", "int8/row", 16),
    ("sm_120", "query", "int4/32", 32),
    ("gfx942", "output", "fp8/128x128", 64),
    ("gfx950", "query", "plain", 16),
]


def test_one_kernel_for_each_target_compiles_within_its_limits() -> None:
    assert [target for target, *_ in QUICK] == list(aot.TARGETS)
    asked = [request(*choice) for choice in QUICK]
    for one, built in zip(asked, aot.compile_all(asked), strict=True):
        check_compiled(one, built)


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_kernel_compiles_within_the_limits(target: str) -> None:
    # Every side and form on each target; row counts and dtypes take turns among the targets.
    turns = ((16, "bf16"), (64, "bf16"), (16, "fp32"))
    start = aot.TARGETS.index(target)
    asked = [
        request(target, side, form, *turns[(start + number) % len(turns)])
        for side in ("query", "output")
        for number, form in enumerate(("plain", "int8/row", "fp8/row", "fp8/128x128", "int4/32", "int4/128"))
    ]
    # The widest heads and latents of any family: longer loops hold more stages at once.
    asked += [
        request(target, side, form, 64, "fp16", stored=256, latent=1024)
        for side in ("query", "output")
        for form in ("plain", "fp8/128x128")
    ]
    for one, built in zip(asked, aot.compile_all(asked), strict=True):
        check_compiled(one, built)
