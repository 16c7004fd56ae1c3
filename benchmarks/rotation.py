"""Whether a rotated latent loses less in few bits: KL on held-out text, latents rounded as a cache would round them.

    python benchmarks/rotation.py [--windows 156] [--formats int8 fp8 int4 int4:32] [--planted] [--json FILE]

The checkpoint that ships with the package, in float32. What ``kv_a_layernorm`` gives, c, is rounded as the cache's
format has it, plain; as c/γ ("fold"); or as P·(c/γ) with P the normalised Hadamard matrix or one of three random
orthogonal ones; and turned back, so that nothing but the rounding differs. Windows of 256 tokens, positions after 64,
KL in nats per position to the original. The mean is what decides whether a rotation is kept; its difference to "plain"
stands beside, with the standard error of paired positions, since few positions, at which a router picks other experts,
carry much of it. ``--planted`` first scales two channels of γ by 30 and the columns of ``kv_b_proj`` by 1/30, which
leaves the model as it is and gives the latents outliers. A forward over the windows for each row: with all windows some
four minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def rounded(model: Any, form: CacheFormat, rotation: Tensor | None) -> Iterator[None]:
    """``model`` with every latent as it comes back from a cache of that format, for the length of a ``with`` block."""

    def through(module: Any, _given: Any, latent: Tensor) -> Tensor:
        gamma = torch.ones(()) if rotation is None else module.weight
        turned = latent / gamma if rotation is None else (latent / gamma) @ rotation.T
        back = decode_latent(*encode(turned, form), torch.float32)
        return back if rotation is None else (back @ rotation) * gamma

    hooks = [layer.self_attn.kv_a_layernorm.register_forward_hook(through) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


@torch.inference_mode()
def main() -> None:
    """Parse the command line, measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=156)
    parser.add_argument("--formats", nargs="+", default=["int8", "fp8", "int4", "int4:32"])
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with no_loading_bars():
        model = load_original(EXAMPLE, dtype=torch.float32)
    if args.planted:
        plant(model)
    ids = read_prompts(EXAMPLE, 1024).take(args.windows, WINDOW)
    reference = list(logits(model, ids))
    rows = []
    for form in args.formats:
        plain = torch.zeros(())
        for name, rotation in rotations(model.config.kv_lora_rank).items():
            with rounded(model, parse_format(form), rotation):
                kl = distances(model, reference, ids)
            plain = kl if name == "plain" else plain
            change = kl - plain
            row = {"format": form, "rotation": name, "mean": float(kl.mean()), "median": float(kl.median())}
            row |= {"mean_change": float(change.mean()), "standard_error": float(change.std() / math.sqrt(len(kl)))}
            rows.append(row)
            print(
                f"{form:>8} {name:>9}: mean {row['mean']:.2e} ({row['mean_change']:+.1e} ± "
                f"{row['standard_error']:.1e}), median {row['median']:.2e}",
                flush=True,
            )
    if args.json:
        machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
        result = {"machine": machine, "windows": args.windows, "planted": args.planted, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
