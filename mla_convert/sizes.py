"""How much is compared: tokens given at once, tokens decoded after them, and sequences side by side."""

from __future__ import annotations

from transformers import PreTrainedModel

from mla_convert.errors import UsageError
from mla_convert.judgement import MINIMUM

#: Tokens at a time in the stage that decodes by blocks.
BLOCK = 3


def check_sizes(prefill: int, decode: int | None, batch: int | None) -> None:
    """UsageError for what is no number, or too small for the stages."""
    for name, value, least, why in (
        ("prefill", prefill, 2, "one token at a time is what decoding compares"),
        ("decode", decode, BLOCK, f"decoding by {BLOCK} is compared too"),
        ("batch", batch, 2, "left padding of different lengths is compared too (one sequence alone always is)"),
    ):
        if value is None and name != "prefill":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}={value!r}; a whole number is needed")
        if value < least:
            raise UsageError(f"{name}={value}; at least {least} are needed: {why}")


def check_positions(model: PreTrainedModel, prefill: int, steps: int) -> None:
    """UsageError where the model has fewer positions than the stages take."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prefill + steps > limit:
        raise UsageError(
            f"prefill={prefill} and decode={steps} take {prefill + steps:,} positions, and this model has {limit:,} "
            "(max_position_embeddings): take fewer of either"
        )


def choose_sizes(prefill: int, decode: int | None, batch: int | None, *, floored: bool) -> tuple[int, int, int]:
    """(prefill, decode, batch), with what was left open; UsageError where they are too few to judge."""
    steps = decode if decode is not None else 64 if floored else 48
    rows = batch if batch is not None else max(4, -(-MINIMUM // steps)) if floored else 4
    if floored and rows * steps < MINIMUM:
        raise UsageError(
            f"batch={rows} times decode={steps} gives {rows * steps} positions, and judging a lower precision needs "
            f"{MINIMUM:,}: take more of either, or leave batch out"
        )
    return prefill, steps, rows
