"""Codes chosen for the inputs that a weight really meets: second-order compensation and a search for scales.

**What is minimised.** A weight W [out, k] multiplies inputs x with the second moment M = E[x xᵀ]; coding it as Ŵ
changes the output by E‖(Ŵ − W) x‖² = tr(Δ M Δᵀ). Rounding to nearest minimises the elements of Δ alone.

**Compensation** (the method known as GPTQ) codes the k inputs' columns one after the other, and after each one moves
the columns still to come to where they make up for its error as well as they can: with U the upper Cholesky factor of
(M + λI)⁻¹, the error e of column j, over U_jj, times U_j,j+1… is taken off the columns behind. λ is a hundredth of the
mean diagonal, so that inputs that never occur change nothing. Scales are fixed before.

**Which axis.** The value side multiplies averaged latents: it sums over its columns, as a Linear does, with one M per
head. The key side is used from the other end: ``z = W_UKᵀ a`` sums over a head's N rows, with M = E[a aᵀ] of the
content queries, while its scales and groups lie along the columns. And z is only half of the score a·(W_UK c), whose
error is E[(aᵀ Δ c)²] = tr(E[a aᵀ] Δ E[c cᵀ] Δᵀ) for independent a and c: so the key side may be compensated along its
rows, with the queries' moment, or along its columns, with the latents', and whatever is chosen is judged by the score.
What all tokens add to a score alike cancels in the softmax, so that the latents' moment is that around their mean.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_convert.geometry import MLAGeometry
from mla_convert.quantization import Quantized, encode, expand, find_scales, quantize, round_steps, tiles
from mla_convert.schemes import Scheme

_DAMPING = 0.01
_BLOCK = 128
#: Shares of the usual scale that the search tries.
_SHARES = tuple(1 - step / 20 for step in range(11))


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of what one layer's absorbed weights meet, float32.

    ``query`` [H, N, N] of the content queries, ``latent`` [C, C] of the cached latents around their mean, ``output``
    [H, C, C] of the averaged latents, ``rank`` [Q, Q] of what the query's up-projection reads.
    """

    query: Tensor
    latent: Tensor
    output: Tensor
    rank: Tensor


def compensate(weight: Tensor, moment: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Codes of ``weight`` [B, out, k] for inputs of ``moment`` [B or 1, k, k], as numbers in units of ``scales``.

    ``scales`` broadcasts to the weight's shape; so does the result have it.
    """
    k = weight.shape[2]
    factor = _factor(moment)
    rest, scales = weight.clone(), scales.expand(weight.shape)
    steps = torch.empty_like(rest)
    for start in range(0, k, _BLOCK):
        stop = min(k, start + _BLOCK)
        errors = torch.empty_like(rest[:, :, start:stop])
        for j in range(start, stop):
            column, scale = rest[:, :, j], scales[:, :, j]
            steps[:, :, j] = round_steps(column / scale, scheme)
            error = (column - steps[:, :, j] * scale) / factor[:, j, j, None]
            rest[:, :, j + 1 : stop] -= error[:, :, None] * factor[:, None, j, j + 1 : stop]
            errors[:, :, j - start] = error
        rest[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    return steps


def _factor(moment: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped moment's inverse, float32 [B, k, k]."""
    wide = moment.double()
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    damping = torch.where(mean > 0, _DAMPING * mean, 1.0)
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide + damping[:, None, None] * eye))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def search_scales(weight: Tensor, scheme: Scheme, importance: Tensor) -> Tensor:
    """For each block the share of its usual scale whose codes err least, elements weighed by ``importance``.

    ``importance`` broadcasts to the weight [rows, columns].
    """
    usual = find_scales(weight, scheme)
    importance = importance.expand(weight.shape)
    best, found = usual, torch.full_like(usual, torch.inf)
    for share in _SHARES:
        error = (quantize(weight, scheme, usual * share).dequantize() - weight).square_() * importance
        block = tiles(error, scheme).sum(dim=(1, 3))
        best = torch.where(block < found, usual * share, best)
        found = torch.minimum(found, block)
    return best


class Chooser:
    """Candidates for the codes of one layer's tensors by one half of a text, judged by the other half."""

    def __init__(self, geometry: MLAGeometry, fit: Moments, judge: Moments) -> None:
        self.geometry = geometry
        self.fit = fit
        self.judge = judge

    def choose(self, key: str, weight: Tensor, scheme: Scheme) -> tuple[Quantized, str]:
        """The codes with the least loss on the judging half, and their name; nearest unless another is better."""
        best, name = quantize(weight, scheme), "nearest"
        least = self.loss(key, best.dequantize() - weight)
        for other, coded in self.candidates(key, weight, scheme):
            loss = self.loss(key, coded.dequantize() - weight)
            if loss < least:
                best, name, least = coded, other, loss
        return best, name

    def candidates(self, key: str, weight: Tensor, scheme: Scheme) -> list[tuple[str, Quantized]]:
        """Codes of ``weight`` [rows, columns] by each method, with its name."""
        searched = search_scales(weight, scheme, self._importance(key, weight))
        found = [("scale search", quantize(weight, scheme, searched))]
        for scales, suffix in ((find_scales(weight, scheme), ""), (searched, " after scale search")):
            for axis, moment in self._moments(key):
                steps = self._compensated(key, weight, scales, scheme, axis, moment)
                found.append((f"compensated along {axis}{suffix}", encode(steps, scales, scheme)))
        return found

    def _moments(self, key: str) -> list[tuple[str, Tensor]]:
        if key == "k_b":
            return [("rows", self.fit.query), ("columns", self.fit.latent[None])]
        return [("columns", {"v_b": self.fit.output, "ov": self.fit.output, "qk": self.fit.rank[None]}[key])]

    def _importance(self, key: str, weight: Tensor) -> Tensor:
        """Diagonals of the moments, as they belong to rows and columns."""
        columns = {"k_b": self.fit.latent, "qk": self.fit.rank}.get(key, self.fit.output).diagonal(dim1=-2, dim2=-1)
        if key == "v_b":
            return columns.repeat_interleave(self.geometry.v_head_dim, 0)
        if key == "k_b":
            return self.fit.query.diagonal(dim1=-2, dim2=-1).reshape(-1, 1) * columns
        return columns.reshape(1, -1)

    def _compensated(
        self, key: str, weight: Tensor, scales: Tensor, scheme: Scheme, axis: str, moment: Tensor
    ) -> Tensor:
        each = expand(scales, scheme, tuple(weight.shape)).expand(weight.shape)
        heads, each_head = self._heads(key, weight, axis), self._heads(key, each, axis)
        steps = compensate(heads, moment, each_head, scheme)
        if key == "ov":
            return steps.transpose(0, 1).reshape(weight.shape)
        return (steps.transpose(1, 2) if axis == "rows" else steps).reshape(weight.shape)

    def _heads(self, key: str, weight: Tensor, axis: str) -> Tensor:
        """[heads, out, summed] of a stored weight; one head where all share their inputs."""
        h = self.geometry.num_heads
        if key == "ov":
            return weight.view(weight.shape[0], h, -1).transpose(0, 1)
        if key == "qk":
            return weight[None]
        heads = weight.view(h, -1, weight.shape[1])
        return heads.transpose(1, 2) if axis == "rows" else heads

    def loss(self, key: str, difference: Tensor) -> float:
        """What a change of the weight under ``key`` does to what it is used for, on the judging half."""
        if key == "k_b":
            delta = self._heads(key, difference, "columns")
            return float(((delta.transpose(1, 2) @ self.judge.query @ delta) * self.judge.latent).sum())
        delta = self._heads(key, difference, "columns")
        moment = self.judge.rank[None] if key == "qk" else self.judge.output
        return float(((delta @ moment) * delta).sum())
