"""Times of the decode kernel, of PyTorch's attention on the same latents, and of transformers' expanded step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gpu import timing
from gpu.setting import CPU, DEVICE, DTYPE, LATENT, ROPE, Shape, free_bytes
from mla_convert.kernels import triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check

#: Scores that PyTorch's attention may hold, in case it computes them all.
MOST_SCORES = 1 << 28


def cache_bytes(shape: Shape) -> int:
    """What the history of one problem takes."""
    each = 1 if shape.codes else DTYPE.itemsize
    return shape.batch * shape.history * (LATENT * each + ROPE * DTYPE.itemsize)


def operations(shape: Shape) -> int:
    """Floating-point operations of one call: scores over C + R, values over C."""
    return 2 * shape.batch * shape.rows * shape.history * (2 * LATENT + ROPE)


def problems(shape: Shape) -> list[DecodeArguments]:
    """Equal problems with other numbers, as many as leave the cache cold.

    Raises:
        MemoryError: where one does not fit.
    """
    held = 3 * shape.batch * shape.history * (LATENT + ROPE) * DTYPE.itemsize
    if held > free_bytes():
        raise MemoryError(f"{shape} takes {held:,} bytes while it is made, {free_bytes():,} are free")
    return [_problem(shape, seed) for seed in range(timing.rotations(cache_bytes(shape)))]


def _problem(shape: Shape, seed: int) -> DecodeArguments:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    width = LATENT + ROPE
    rows = torch.randn(shape.batch, shape.history, width, generator=gen, device=DEVICE, dtype=DTYPE)
    query = torch.randn(shape.batch, shape.new, shape.heads, width, generator=gen, device=DEVICE, dtype=DTYPE)
    latent = rows[..., :LATENT]
    latent = {None: lambda: latent, "fp8": lambda: latent.to(torch.float8_e4m3fn), "int8": lambda: _int8(latent)}[
        shape.codes
    ]()
    arguments = DecodeArguments(
        query[..., :LATENT],
        query[..., LATENT:],
        latent,
        rows[..., LATENT:] if shape.codes is None else rows[..., LATENT:].contiguous(),
        width**-0.5,
        kv_lens=torch.full((shape.batch,), shape.history, device=DEVICE),
        latent_scale=_SCALES[shape.codes],
    )
    return check(arguments)


_SCALES = {None: None, "fp8": 1.0, "int8": 4 / 127}


def _int8(latent: torch.Tensor) -> torch.Tensor:
    return (latent * (127 / 4)).round().clamp(-127, 127).to(torch.int8)


def kernel_times(shape: Shape, tops: dict[str, float]) -> dict[str, Any]:
    """The kernel by median and by graph replay, and PyTorch's attention on the same latents."""
    made = problems(shape)
    calls = [lambda args=args: triton_decode.decode(args) for args in made]
    size = {"read": cache_bytes(shape), "operations": operations(shape), "tops": tops}
    found: dict[str, Any] = {
        "tile": dataclasses.asdict(triton_decode.tile_for(made[0])),
        "kernel": timing.rates(timing.seconds(calls), **size),
        "graph": timing.rates(timing.seconds(calls, graph=True), **size),
    }
    if shape.codes is None:
        found["sdpa"] = _sdpa_times(shape, made, size)
        if "seconds" in found["sdpa"]:
            found["times_faster_than_sdpa"] = found["sdpa"]["seconds"] / found["kernel"]["seconds"]
    return found


def _sdpa_times(shape: Shape, made: list[DecodeArguments], size: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's own attention, and how far its result is from the kernel's, of the largest number."""
    scores = shape.batch * shape.rows * shape.history
    if scores > MOST_SCORES:
        return {"left_out": f"{scores:,} scores, more than {MOST_SCORES:,}"}
    calls = [_sdpa(args) for args in made]
    ours, theirs = triton_decode.decode(made[0])[0].float(), calls[0]().float()
    difference = float((ours - theirs.view_as(ours)).abs().max() / theirs.abs().max())
    return timing.rates(timing.seconds(calls), **size) | {"relative_difference": difference}


def _sdpa(args: DecodeArguments) -> Any:
    """A call of ``scaled_dot_product_attention`` on the same tensors: new tokens and heads are the rows of one head.

    Query and keys are joined beforehand: the rows of a cache of 576 numbers are keys as they are.
    """
    query, keys = (torch.cat(pair, -1) for pair in ((args.q_latent, args.q_rope), (args.latent, args.k_rope)))
    new, heads = query.shape[1:3]
    query, keys, values = query.flatten(1, 2)[:, None], keys[:, None], args.latent[:, None]
    mask = None
    if new > 1:
        limits = torch.arange(keys.shape[2] - new, keys.shape[2], device=keys.device).repeat_interleave(heads)
        mask = torch.arange(keys.shape[2], device=keys.device) <= limits[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, keys, values, attn_mask=mask, scale=args.scale)


def against_transformers(dims: str, history: int) -> dict[str, float]:
    """One attention module's decode step, transformers' expanded one and the patched one, in turns."""
    import decode_step

    return decode_step.on_device(dims, torch.float32 if CPU else torch.bfloat16, history, DEVICE)
