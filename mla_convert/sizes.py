"""How much is compared or timed: tokens given at once, tokens decoded after them, sequences side by side, contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from transformers import PreTrainedModel

from mla_convert.errors import UsageError
from mla_convert.judgement import MINIMUM
from mla_convert.wording import option

#: Tokens at a time in the stage that decodes by blocks.
BLOCK = 3
#: Tokens that a timed step sees, where nobody says how many.
DEFAULT_CONTEXTS = (64, 1024, 4096)
#: Below this, quartiles are the repetitions themselves.
FEWEST_REPETITIONS = 3


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_sizes(prefill: int, decode: int | None, batch: int | None) -> None:
    """UsageError for what is no number, or too small for the stages."""
    for name, value, least, why in (
        ("prefill", prefill, 2, "one token at a time is what decoding compares"),
        ("decode", decode, BLOCK, f"decoding by {BLOCK} is compared too"),
        ("batch", batch, 2, "left padding of different lengths is compared too (one sequence alone always is)"),
    ):
        if value is None and name != "prefill":
            continue
        if not is_whole(value):
            raise UsageError(f"{option(name, value)}; a whole number is needed")
        if value < least:
            raise UsageError(f"{option(name, value)}; at least {least} are needed: {why}")


def check_positions(model: PreTrainedModel, prefill: int, steps: int) -> None:
    """UsageError where the model has fewer positions than the stages take."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prefill + steps > limit:
        raise UsageError(
            f"{option('prefill', prefill)} and {option('decode', steps)} take {prefill + steps:,} positions, and this "
            f"model has {limit:,} (max_position_embeddings): take fewer of either"
        )


def choose_sizes(prefill: int, decode: int | None, batch: int | None, *, floored: bool) -> tuple[int, int, int]:
    """(prefill, decode, batch), with what was left open; UsageError where they are too few to judge."""
    steps = decode if decode is not None else 64 if floored else 48
    rows = batch if batch is not None else max(4, -(-MINIMUM // steps)) if floored else 4
    if floored and rows * steps < MINIMUM:
        raise UsageError(
            f"{option('batch', rows)} times {option('decode', steps)} gives {rows * steps} positions, and judging a "
            f"lower precision needs {MINIMUM:,}: take more of either, or leave {option('batch')} out"
        )
    return prefill, steps, rows


def check_counts(repetitions: int, batch: int) -> None:
    """UsageError where steps are timed too few times, or for no sequence, or these are no numbers."""
    for name, value in (("repetitions", repetitions), ("batch", batch)):
        if not is_whole(value):
            raise UsageError(f"{option(name, value)}; a whole number is needed")
    if repetitions < FEWEST_REPETITIONS:
        raise UsageError(f"{option('repetitions', repetitions)} gives no quartiles; take {FEWEST_REPETITIONS} or more")
    if batch < 1:
        raise UsageError(f"{option('batch', batch)} leaves no sequence to decode; take 1 or more")


def _are_whole(given: object) -> bool:
    return isinstance(given, Sequence) and all(map(is_whole, given))  # the letters of a word are none


def choose_contexts(contexts: Sequence[int] | None, model: PreTrainedModel) -> tuple[int, ...]:
    """The contexts, or by default those that fit; UsageError for one that the model has no positions for."""
    limit = int(model.config.get_text_config().max_position_embeddings)
    if contexts is None:
        return tuple(length for length in DEFAULT_CONTEXTS if length <= limit) or (limit,)
    if not _are_whole(contexts):
        raise UsageError(f"{option('contexts', contexts)}; a list of whole numbers is needed, for example [64, 1024]")
    wrong = [length for length in contexts if not 1 <= length <= limit]
    if wrong or not contexts:
        raise UsageError(
            f"{option('contexts', wrong or list(contexts))}: this model has {limit:,} positions "
            f"(max_position_embeddings); give one or more whole numbers from 1 to {limit:,}, the new token counted in"
        )
    return tuple(contexts)
