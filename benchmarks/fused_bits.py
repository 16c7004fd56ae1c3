"""A fused matrix in few bits against its two factors in the same number of bytes.

    python benchmarks/fused_bits.py [--json FILE]

W_UKᵀ·W_UQ [C, Q] has rank N at most, and so has the product of its coded factors, which are fewer numbers: N·(C + Q).
At equal bytes the factors afford more bits each. Both are coded in symmetric groups of 32 with a float32 scale, to the
nearest code; the error is that of the product, in the Frobenius norm over all heads and layers. Trained weights are
those of the checkpoint that ships with the package; random ones stand for DeepSeek-V3's dimensions (four heads).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator

import recording
import torch
from torch import Tensor

import mla_convert
from mla_convert.absorption import split_kv_b, split_q_b
from mla_convert.checkpoint import Checkpoint

GROUP, SCALE_BITS = 32, 32
Pair = tuple[Tensor, Tensor]


def code(weight: Tensor, bits: int) -> Tensor:
    """Coded and decoded, in groups of 32 along the columns."""
    groups = weight.reshape(-1, GROUP)
    half = 2.0 ** (bits - 1)
    scale = (groups.abs().amax(dim=1, keepdim=True) / (half - 0.5)).clamp(min=1e-30)
    return ((groups / scale).round().clamp(-half, half - 1) * scale).view(weight.shape)


def example(side: str) -> Iterator[Pair]:
    """Both factors [m, j], [j, k] of every head and layer of the example."""
    checkpoint = Checkpoint.open(pathlib.Path(mla_convert.__file__).parent / "example")
    for spec in checkpoint.layers:
        g = spec.geometry
        w_uk, w_uv = split_kv_b(checkpoint.weight(spec.kv_b, torch.float32), g)
        if side == "key":
            w_uq, _ = split_q_b(checkpoint.weight(spec.query, torch.float32), g)
            yield from zip(w_uk.transpose(1, 2), w_uq, strict=True)
        else:
            w_o = checkpoint.weight(spec.o, torch.float32).view(g.hidden_size, g.num_heads, -1)
            yield from zip(w_o.transpose(0, 1), w_uv, strict=True)


def random(side: str) -> Iterator[Pair]:
    """Four heads of DeepSeek-V3's dimensions."""
    generator = torch.Generator().manual_seed(0)
    m, k = (512, 1536) if side == "key" else (7168, 512)
    for _ in range(4):
        yield torch.randn(m, 128, generator=generator), torch.randn(128, k, generator=generator)


def compare(name: str, side: str, bits: int) -> dict[str, object]:
    """Errors of one side: fused in ``bits``, and its factors in as many bits as the same bytes allow."""
    pairs = list(random(side) if name == "random, V3" else example(side))
    left, right = pairs[0]
    numbers, factors = left.shape[0] * right.shape[1], left.numel() + right.numel()
    per_number = bits + SCALE_BITS / GROUP
    afforded = min(16, int(per_number * numbers / factors - SCALE_BITS / GROUP))
    size = fused = factored = 0.0
    for a, b in pairs:
        product = a @ b
        size += float(product.square().sum())
        fused += float((code(product, bits) - product).square().sum())
        # W_UK is stored with its columns along C: transposed here, so that its groups are those of the store.
        left_coded = code(a.T.contiguous(), afforded).T if side == "key" else code(a.contiguous(), afforded)
        factored += float((left_coded @ code(b.contiguous(), afforded) - product).square().sum())
    return {
        "weights": name,
        "side": side,
        "fused bits": bits,
        "factor bits": afforded,
        "fused error": (fused / size) ** 0.5,
        "factors error": (factored / size) ** 0.5,
        "bytes of factors over fused": (afforded + SCALE_BITS / GROUP) * factors / (per_number * numbers),
    }


def main() -> None:
    """Print every case, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    recording.add_json(parser)
    args = parser.parse_args()
    rows = []
    for name in ("example", "random, V3"):
        for side in ("key", "value"):
            for bits in (4, 8):
                rows.append(compare(name, side, bits))
                print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    recording.write(parser, args, rows)


if __name__ == "__main__":
    main()
