"""Proofs of single properties of the decode kernel that random cases do not reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import decode_cases
import torch

from gpu.correctness import judged, moved
from gpu.setting import CPU, DEVICE, DTYPE, LATENT, ROPE
from mla_convert import kernels
from mla_convert.kernels import triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check

HEADS = 5 if CPU else 128
LENGTHS = (65, 20) if CPU else (1500, 700)


def _case(**changes: Any) -> decode_cases.Case:
    usual = {"heads": HEADS, "lens": LENGTHS, "latent": LATENT, "rope": ROPE, "dtype": DTYPE}
    return decode_cases.Case(**usual | changes)


def _same(found: Any, expected: Any, what: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{what}: other bits"


def flashmla() -> dict[str, Any]:
    """FlashMLA's rows of 656 bytes, as they lie in memory and in pages of 64, against float64."""
    found = {}
    for name, paged in (("contiguous", False), ("paged", True)):
        args = check(decode_cases.flashmla_problem(paged, DTYPE))
        found[name] = judged(f"FlashMLA {name}", args, *triton_decode.decode(check(moved(args))))
    return found


def merged() -> dict[str, Any]:
    """A history in two parts, merged, against float64 over the whole; one cut leaves nothing on one side."""
    length = LENGTHS[0]
    args = check(decode_cases.build(_case(batch=1, lens=(length,))))
    args = dataclasses.replace(args, latent=args.latent[:, :length], k_rope=args.k_rope[:, :length], kv_lens=None)
    there = check(moved(args))
    found = {}
    for cut in (0, 1, length // 3, length):
        parts = []
        for share in (slice(0, cut), slice(cut, length)):
            part = dataclasses.replace(there, latent=there.latent[:, share], k_rope=there.k_rope[:, share])
            parts += triton_decode.decode(check(part))
        found[f"cut at {cut}"] = judged(f"merged at {cut}", args, *kernels.merge(*parts))
    return found


def shared_prefix() -> dict[str, Any]:
    """Two sequences that begin with the same page give what they give with a copy of it each."""
    page = 16 if CPU else 256
    args = moved(decode_cases.build(_case(layout="paged", page=page, lens=(page + 9, page + 3))))
    table = args.block_table
    assert table is not None
    apart = dataclasses.replace(args, latent=args.latent.clone(), k_rope=args.k_rope.clone())
    for cached in (apart.latent, apart.k_rope):
        cached[table[1, 0]] = cached[table[0, 0]]
    shared = table.clone()
    shared[1, 0] = table[0, 0]
    found = triton_decode.decode(dataclasses.replace(args, block_table=shared))
    _same(found, triton_decode.decode(apart), "a shared page")
    return {"page": page, "bits": "the same"}


def far_offsets() -> dict[str, Any]:
    """Pages past 2**31 numbers (a few only in the interpreter, whose memory is this machine's)."""
    page, width, used = 480, LATENT + ROPE, 300 if not CPU else 40
    pages = 20 if CPU else (1 << 31) // (page * width) + 40
    cache = torch.zeros(pages, page, width, dtype=DTYPE, device=DEVICE)
    near = torch.randn(1, used, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    cache[-1, :used] = near[0]
    query = torch.randn(1, 1, HEADS, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)

    def problem(of: torch.Tensor, **fields: Any) -> DecodeArguments:
        halves = of[..., :LATENT], of[..., LATENT:]
        return check(DecodeArguments(query[..., :LATENT], query[..., LATENT:], *halves, scale=0.05, **fields))

    expected = triton_decode.decode(problem(near))
    lengths = torch.tensor([used], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device=DEVICE)
    _same(triton_decode.decode(problem(cache, block_table=table, kv_lens=lengths)), expected, "the last page")
    positions = (torch.arange(used, dtype=torch.int32, device=DEVICE) + (pages - 1) * page).view(1, 1, -1)
    whole = cache.view(1, pages * page, width)
    chosen = triton_decode.decode(problem(whole, indices=positions))
    _same(chosen, triton_decode.decode(problem(near, indices=positions - (pages - 1) * page)), "the last tokens")
    return {"numbers": cache.numel(), "past_2_31": cache.numel() > 1 << 31}


def compiled() -> dict[str, Any]:
    """The operator under ``torch.compile``, in one graph, gives what it gives without."""
    args = moved(decode_cases.build(_case()))

    def step(q_latent: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"scale": args.scale, "kv_lens": args.kv_lens, "backend": "triton"}
        return kernels.absorbed_decode(2 * q_latent, args.q_rope, latent, args.k_rope, **given)

    expected = step(args.q_latent, args.latent)
    run = torch.compile(step, fullgraph=True, backend="eager" if CPU else "inductor")
    _same(run(args.q_latent, args.latent), expected, "compiled")
    return {"bits": "the same"}


def replayed() -> dict[str, Any]:
    """A captured CUDA graph, replayed after the cache and the lengths have changed in place."""
    if CPU:
        return {"left_out": "graphs are CUDA's"}
    args = moved(decode_cases.build(_case(batch=2)))
    assert args.kv_lens is not None
    other = moved(decode_cases.build(_case(batch=2, seed=1, lens=(LENGTHS[0], 33))))
    triton_decode.decode(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_decode.decode(args)
    names = ("q_latent", "q_rope", "latent", "k_rope", "kv_lens")
    for name in names:
        getattr(args, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    expected = triton_decode.decode(dataclasses.replace(args, **{n: getattr(args, n).clone() for n in names}))
    _same(found, expected, "replayed")
    return {"bits": "the same"}


#: By name, in the order in which they run.
ALL = {
    "FlashMLA rows": flashmla,
    "merged parts": merged,
    "shared prefix": shared_prefix,
    "offsets past 2**31": far_offsets,
    "compiled": compiled,
    "graph replayed": replayed,
}
