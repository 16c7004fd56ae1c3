"""Whether a rotated latent loses less in few bits: latents rounded as a cache would round them, plain and rotated.

    python benchmarks/rotation.py [--planted none gamma latent] [--windows 156] [--formats int8 fp8 int4 int4:32]
                                  [--json FILE]

Latents c are rounded as the cache's format has it, plain; as c/γ ("fold"); or as P·(c/γ) with P the normalised Hadamard
matrix or one of three random orthogonal ones; and turned back, so that nothing but the rounding differs. Measured are

- "none": the checkpoint that ships with the package, in float32, on held-out text: windows of 256 tokens, positions
  after 64, KL in nats per position to the original. The mean is what decides whether a rotation is kept; its difference
  to "plain" stands beside, with the standard error of paired positions, since few positions, at which a router picks
  other experts, carry much of it;
- "gamma": the same with two channels of γ scaled by 30 and the columns of ``kv_b_proj`` by 1/30, which leaves the model
  as it is and gives the latents outliers that folding takes away;
- "latent": random latents with outliers in what the norm gives, which no folding takes away, and the relative error
  of what the weights make of them: one channel in 64, each in a group of its own ("apart") or all in one ("together").

A forward over the windows for each row of the first two: with all windows some four minutes each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import recording
import torch
from torch import Tensor

import mla_convert
from mla_convert.divergence import kl_divergence
from mla_convert.kernels.history import decode_latent
from mla_convert.machine import describe_machine
from mla_convert.patches.cache_formats import CacheFormat, encode, parse_format
from mla_convert.patches.loading import load_original
from mla_convert.prompts import read_prompts
from mla_convert.quality import PREFILL, WINDOW
from mla_convert.quiet import no_loading_bars

EXAMPLE = pathlib.Path(mla_convert.__file__).parent / "example"
BATCH = 12
OUTLIERS, FACTOR = (3, 40), 30.0
PLANTED = ["none", "gamma", "latent"]
#: Of the random latents: tokens, C, and where the outlier channels are.
TOKENS, LATENT = 2048, 512
PLACES = {"apart": [9, 74, 185, 212, 300, 371, 406, 510], "together": list(range(100, 108))}


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix, orthonormal; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def rotations(size: int) -> dict[str, Tensor | None]:
    """By name the P of each row; None rounds c itself."""
    found: dict[str, Tensor | None] = {"plain": None, "fold": torch.eye(size), "Hadamard": hadamard(size)}
    for seed in range(3):
        gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
        found[f"random {seed}"] = torch.linalg.qr(gaussian).Q
    return found


def through(latent: Tensor, form: CacheFormat, rotation: Tensor | None, gamma: Tensor) -> Tensor:
    """``latent`` [..., C] as it comes back from a cache of that format."""
    turned = latent if rotation is None else (latent / gamma) @ rotation.T
    back = decode_latent(*encode(turned, form), torch.float32)
    return back if rotation is None else (back @ rotation) * gamma


@contextlib.contextmanager
def rounded(model: Any, form: CacheFormat, rotation: Tensor | None) -> Iterator[None]:
    """``model`` with every latent as it comes back from a cache of that format, for the length of a ``with`` block."""

    def hook(module: Any, _given: Any, latent: Tensor) -> Tensor:
        return through(latent, form, rotation, module.weight)

    hooks = [layer.self_attn.kv_a_layernorm.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def plant(model: Any) -> None:
    """Outlier channels of the latent, in a model that stays as it is."""
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.weight[list(OUTLIERS)] *= FACTOR
        layer.self_attn.kv_b_proj.weight[:, list(OUTLIERS)] /= FACTOR


def logits(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """[rows, vocabulary] of the compared positions, some windows at a time."""
    for start in range(0, len(ids), BATCH):
        yield model(ids[start : start + BATCH], use_cache=False).logits[:, PREFILL:].flatten(0, 1)


def distances(model: Any, reference: list[Tensor], ids: Tensor) -> Tensor:
    """KL of each compared position, float64."""
    pairs = zip(reference, logits(model, ids), strict=True)
    return torch.cat([kl_divergence(ours.double(), theirs.double()) for ours, theirs in pairs])


def measure_model(planted: str, forms: list[str], windows: int) -> list[dict[str, Any]]:
    """A row for each format and rotation: the KL to the original of the model whose latents are rounded."""
    with no_loading_bars():
        model = load_original(EXAMPLE, dtype=torch.float32)
    if planted == "gamma":
        plant(model)
    ids = read_prompts(EXAMPLE, 1024).take(windows, WINDOW)
    reference = list(logits(model, ids))
    rows: list[dict[str, Any]] = []
    for form in forms:
        plain = torch.zeros(())
        for name, rotation in rotations(model.config.kv_lora_rank).items():
            with rounded(model, parse_format(form), rotation):
                kl = distances(model, reference, ids)
            plain = kl if name == "plain" else plain
            change = kl - plain
            row = {"planted": planted, "format": form, "rotation": name}
            row |= {"mean": float(kl.mean()), "median": float(kl.median())}
            row |= {"mean_change": float(change.mean()), "standard_error": float(change.std() / math.sqrt(len(kl)))}
            rows.append(row)
            print(
                f"{planted:>6} {form:>8} {name:>9}: mean {row['mean']:.2e} ({row['mean_change']:+.1e} ± "
                f"{row['standard_error']:.1e}), median {row['median']:.2e}",
                flush=True,
            )
    return rows


def measure_latents(places: str, forms: list[str]) -> list[dict[str, Any]]:
    """A row for each format and rotation: the relative error of W·c for normalised latents c with outlier channels.

    The columns of W [C, C] are as much smaller as their channels are larger, so that all channels count alike; γ is 1.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.ones(LATENT)
    size[PLACES[places]] = FACTOR
    latents = torch.randn(TOKENS, LATENT, generator=generator) * size
    latents /= latents.square().mean(dim=-1, keepdim=True).sqrt()
    weight = torch.randn(LATENT, LATENT, generator=generator) / size
    rows: list[dict[str, Any]] = []
    for form in forms:
        for name, rotation in rotations(LATENT).items():
            change = through(latents, parse_format(form), rotation, torch.ones(LATENT)) - latents
            error = float((change @ weight.T).norm() / (latents @ weight.T).norm())
            rows.append({"planted": "latent", "places": places, "format": form, "rotation": name, "error": error})
            print(f"latent, {places:>8} {form:>8} {name:>9}: relative error {error:.3g}")
    return rows


@torch.inference_mode()
def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planted", choices=PLANTED, nargs="+", default=PLANTED)
    parser.add_argument("--windows", type=int, default=156)
    parser.add_argument("--formats", nargs="+", default=["int8", "fp8", "int4", "int4:32"])
    recording.add_json(parser)
    args = parser.parse_args()
    rows = []
    for planted in args.planted:
        if planted == "latent":
            rows += [row for places in PLACES for row in measure_latents(places, args.formats)]
        else:
            rows += measure_model(planted, args.formats, args.windows)
    machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
    recording.write(parser, args, {"machine": machine, "windows": args.windows, "rows": rows})


if __name__ == "__main__":
    main()
