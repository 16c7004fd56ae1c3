"""The decode kernel on random hostile cases against float64, and bit for bit against itself."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import decode_cases
import torch
from decode_bounds import bounds

from gpu.setting import CPU, DEVICE, LATENT, ROPE
from mla_convert.kernels import triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check

#: (C, R): those of models, and odd ones.
WIDTHS = ((512, 64), (512, 64), (256, 64), (128, 32), (192, 32), (1024, 64), (64, 0), (256, 16))
LENGTHS = (0, 1, 20, 63, 64, 65, 140, 600, 2000, 5000)
HEADS = (1, 3, 6, 12, 16, 20, 32, 63, 64, 126, 128)
DTYPES = (torch.float16, torch.float32) if CPU else (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("joint", "paged", "strided", "separate", "paged")
CODES = (None, "fp8/group", None, "fp8/token", "int8/token", None, "fp8/tensor")


def random_case(number: int) -> decode_cases.Case:
    """A hostile case; dtypes, codes and layouts take turns, and their numbers have no common factor: all pairs meet."""
    rng = random.Random(number)
    batch = rng.randint(1, 4)
    latent, rope = (64, 16) if CPU else rng.choice(WIDTHS)
    return decode_cases.Case(
        batch=batch,
        q_len=rng.choice((1, 2) if CPU else (1, 1, 2, 4, 8, 16)),
        heads=rng.choice((1, 3, 16) if CPU else HEADS),
        latent=latent,
        rope=rope,
        lens=tuple(rng.randint(0, 70) if CPU else rng.choice(LENGTHS) for _ in range(batch)),
        dtype=DTYPES[number % len(DTYPES)],
        layout=LAYOUTS[number % len(LAYOUTS)],
        page=rng.choice((1, 16, 64, 256)),
        codes=CODES[number % len(CODES)],
        masked=rng.random() < 0.3,
        indices=rng.choice((0, 0, 0, 33)),
        sinks=rng.random() < 0.3,
        seed=number,
    )


def moved(args: DecodeArguments) -> DecodeArguments:
    """Arguments on the device, strides kept; codes travel as bytes."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
        as_bytes = value.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        (there.view(torch.uint8) if as_bytes else there).copy_(value.view(torch.uint8) if as_bytes else value)
        return there

    return DecodeArguments(**{f.name: move(getattr(args, f.name)) for f in dataclasses.fields(args)})


def check_case(number: int) -> dict[str, Any]:
    """The kernel's largest error and what it is allowed (``decode_bounds``), for output and log-sum-exp.

    Raises:
        AssertionError: where an error is larger.
    """
    case = random_case(number)
    args = check(decode_cases.build(case))
    return judged(str(case), args, *triton_decode.decode(check(moved(args))))


def judged(name: str, args: DecodeArguments, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Any]:
    """A result's errors beside what they may be (``decode_bounds``), for ``args`` on the CPU.

    Raises:
        AssertionError: where an error is larger.
    """
    limits = bounds(args)
    out, lse = out.cpu(), lse.cpu()
    same = torch.equal(torch.isneginf(lse), torch.isneginf(limits.exact_lse))
    assert same, f"{name}: other rows are empty than in the reference"
    error, lse_error = limits.errors(out, lse)
    found = {"case": name, "error": error, "allowed": limits.out, "lse_error": lse_error, "lse_allowed": limits.lse}
    # Written so that a NaN fails.
    assert error <= limits.out, f"output: {found}"
    assert lse_error <= limits.lse, f"log-sum-exp: {found}"
    return found


def bit_equality() -> dict[str, bool]:
    """A sequence alone and in its batch, paged and not, twice: the same bits; plain, with sinks, and in codes.

    Raises:
        AssertionError: where bits differ.
    """
    found = {
        f"{kind} {name}": same
        for kind, changes in {"plain": {}, "sinks": {"sinks": True}, "fp8": {"codes": "fp8/group"}}.items()
        for name, same in _bit_equality(**changes).items()
    }
    assert all(found.values()), f"not bit-equal: {found}"
    return found


def _bit_equality(**changes: Any) -> dict[str, bool]:
    case = decode_cases.Case(
        batch=3,
        lens=(65, 20, 110) if CPU else (650, 2000, 1100),
        q_len=2,
        heads=5 if CPU else 128,
        latent=LATENT,
        rope=ROPE,
        dtype=torch.float32 if CPU else torch.bfloat16,
        **changes,
    )
    args = moved(decode_cases.build(case))
    out, lse = triton_decode.decode(args)
    again = triton_decode.decode(args)
    names = ["q_latent", "q_rope", "latent", "k_rope", "kv_lens"] + ["latent_scale"] * args.coded
    alone = triton_decode.decode(dataclasses.replace(args, **{n: getattr(args, n)[1:2] for n in names}))
    short = {n: getattr(args, n)[1:2, : case.lens[1]] for n in names if n in ("latent", "k_rope", "latent_scale")}
    rest = {n: getattr(args, n)[1:2] for n in names if n not in short}
    small = triton_decode.decode(dataclasses.replace(args, **short, **rest))
    found = {
        "again": torch.equal(out, again[0]) and torch.equal(lse, again[1]),
        "alone": torch.equal(out[1:2], alone[0]) and torch.equal(lse[1:2], alone[1]),
        "alone, no room left": torch.equal(out[1:2], small[0]) and torch.equal(lse[1:2], small[1]),
    }
    queries = {"q_latent": args.q_latent, "q_rope": args.q_rope, "sinks": args.sinks}
    for name, layout in (("page 16", {"layout": "paged"}), ("page 64", {"layout": "paged", "page": 64})):
        other = moved(decode_cases.build(dataclasses.replace(case, **layout)))
        result = triton_decode.decode(dataclasses.replace(other, **queries))
        found[name] = torch.equal(out, result[0]) and torch.equal(lse, result[1])
    strided = moved(decode_cases.build(dataclasses.replace(case, layout="strided")))
    result = triton_decode.decode(dataclasses.replace(strided, **queries))
    found["strided"] = torch.equal(out, result[0]) and torch.equal(lse, result[1])
    return found
