"""Formats of a cached latent: numbers to codes and scales, by the definitions that ``absorbed_decode`` reads.

All are symmetric, in float32, with one scale per token or per group of a token's C numbers:
``number = code · scale``. The rotary key is never coded.

=========  ==============================  ==============  =======================================================
format     codes                           scale           error of one number x, at most
=========  ==============================  ==============  =======================================================
model      none: the model's dtype         none            0
int8       int8, −127 … 127                largest / 127   scale / 2
int4       two nibbles − 8 a byte, −7 … 7  largest / 7     scale / 2
fp8        float8_e4m3fn                   largest / 448   |x| / 16, or scale / 1024 where that is more
flashmla   fp8 in groups of 128            largest / 448   the same
=========  ==============================  ==============  =======================================================

To each bound belongs the rounding of the scale and of the product, 2^-22 of the largest number of its group, and
the one rounding to the model's dtype. FP8's bound is half a step of e4m3: three bits behind the leading one give
2^-4 of the number, and below its smallest normal number, 2^-6, the steps are 2^-9.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_convert.errors import UsageError

#: The number that the largest of a group is coded as.
TOPS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
#: Below this a group's numbers are all coded as zero; it keeps the scale above zero.
_SMALLEST = 1e-30

FLASHMLA_GROUP = 128


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """How a cache stores latents.

    Attributes:
        name: "model", "int8", "int4", "fp8" or "flashmla".
        group: numbers that share a scale; None is all C numbers of a token.
    """

    name: str = "model"
    group: int | None = None

    @property
    def coded(self) -> bool:
        """Whether latents are stored as codes."""
        return self.name != "model"

    @property
    def kind(self) -> str:
        """The kind of codes, a key of :data:`TOPS`."""
        return "fp8" if self.name == "flashmla" else self.name

    def __str__(self) -> str:
        return self.name if self.group is None or self.name == "flashmla" else f"{self.name}:{self.group}"


def parse_format(text: str) -> CacheFormat:
    """``"int8"``, ``"int4:32"`` (groups of 32), ``"fp8"``, ``"flashmla"`` or ``"model"`` as a :class:`CacheFormat`.

    Raises:
        UsageError: for any other text.
    """
    name, colon, group = str(text).partition(":")
    if name == "flashmla" and not colon:
        return CacheFormat(name, FLASHMLA_GROUP)
    if name == "model" and not colon:
        return CacheFormat()
    if name not in TOPS or (colon and not (group.isascii() and group.isdigit() and int(group) > 0)):
        raise UsageError(
            f'cache format {text!r} is not known; choose "model" (the model\'s dtype), "int8", "int4", "fp8" (a scale '
            'per token), one of these with the size of a group behind a colon ("int4:32"), or "flashmla"'
        )
    return CacheFormat(name, int(group) if colon else None)


def parse_cache(text: str) -> CacheFormat | None:
    """``patch``'s argument ``cache``: "dynamic" is None, "latent" the model's dtype, "latent:int8" a format.

    Raises:
        UsageError: for any other text.
    """
    name, colon, form = text.partition(":")
    if name == "latent":
        return parse_format(form) if colon else CacheFormat()
    if text != "dynamic":
        raise UsageError(
            f'cache {text!r} is not known; choose "latent", "latent:FORMAT" (such as "latent:int8"), or "dynamic"'
        )
    return None


def encode(latent: Tensor, form: CacheFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``latent`` [..., C].

    Returns:
        Codes [..., C] int8 or float8_e4m3fn, or [..., C/2] uint8 (low nibble first), and float32 scales [..., G].
        What is not finite makes its whole group NaN when it is read again.
    """
    wide = latent.detach().to(torch.float32)
    group = form.group or latent.shape[-1]
    grouped = wide.reshape(*latent.shape[:-1], latent.shape[-1] // group, group)
    scale = grouped.abs().amax(dim=-1).clamp(min=_SMALLEST) / TOPS[form.kind]
    numbers = (grouped / scale[..., None]).flatten(-2)
    if form.kind == "fp8":
        return numbers.to(torch.float8_e4m3fn), scale
    numbers = numbers.round_().nan_to_num_(0.0)
    if form.kind == "int8":
        return numbers.to(torch.int8), scale
    nibbles = numbers.add_(8).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale
