"""Paged caches: sequences of unequal length in one pool, against each sequence alone, and the table's bookkeeping."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.kernels import absorbed_decode
from mla_convert.kernels.arguments import DecodeArguments, check
from mla_convert.kernels.reference import absorbed_decode_reference
from mla_convert.patches.paged import PagedLatentCache
from mla_convert.patches.pages import PageTable


def left_padded(rows: list[torch.Tensor]) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.stack([torch.cat((row.new_zeros(width - len(row)), row)) for row in rows])


def fed(model: Any, cache: PagedLatentCache, sequences: list[int], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence's new tokens."""
    ids = left_padded(rows)
    with cache.batch(sequences, [len(row) for row in rows]):
        logits = model(ids, cache=cache, position_ids=cache.positions(ids.shape[1])).logits
    return [one[ids.shape[1] - len(row) :] for one, row in zip(logits, rows, strict=True)]


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None], cache=DynamicCache()).logits[0]  # type: ignore[no-any-return]


@torch.inference_mode()
@pytest.mark.parametrize("form", ["model", "int8"])
def test_ragged_batches_give_what_each_sequence_gives_alone(form: str) -> None:
    """Prompts of unequal length, steps, several tokens at once, a sequence that joins late and one that leaves."""
    model = models.deepseek_v3()
    a, b, c = models.tokens(3, 20)
    handle = mla_convert.patch(model)
    cache = PagedLatentCache(model.config, pages=24, page=4, format=form)
    first, second = cache.add(), cache.add()
    got_a, got_b = [[out] for out in fed(model, cache, [first, second], [a[:9], b[:5]])]
    for at in range(2):
        outs = fed(model, cache, [first, second], [a[9 + at, None], b[5 + at, None]])
        for got, out in zip((got_a, got_b), outs, strict=True):
            got.append(out)
    third = cache.add()
    out_c, out_b = fed(model, cache, [third, second], [c[:6], b[7:9]])
    got_b.append(out_b)
    cache.remove(first)
    (more_c,) = fed(model, cache, [third], [c[6:12]])
    handle.unpatch()
    assert cache.length(second) == 9 and cache.length(third) == 12
    found = [torch.cat(got_a), torch.cat(got_b), torch.cat((out_c, more_c))]
    if form == "model":
        expected = [alone(model, ids[: len(out)]) for ids, out in zip((a, b, c), found, strict=True)]
    else:
        caches = [mla_convert.LatentCache(model.config, format=form) for _ in found]
        expected = [
            model(ids[None, : len(out)], cache=one).logits[0]
            for ids, out, one in zip((a, b, c), found, caches, strict=True)
        ]
    for one, other in zip(found, expected, strict=True):
        assert models.relative(one, other) <= 1e-4


@torch.inference_mode()
def test_forks_share_pages_until_they_write() -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 16)
    with mla_convert.patched(model):
        cache = PagedLatentCache(model.config, pages=6, page=4)
        stem = cache.add()
        fed(model, cache, [stem], [ids[0, :10]])
        assert len(cache.table.free) == 3
        branch = cache.fork(stem)
        assert len(cache.table.free) == 3
        out_stem, out_branch = fed(model, cache, [stem, branch], [ids[0, 10:12], ids[1, 10:12]])
        assert len(cache.table.free) == 2  # the page that both wrote to is there twice
        cache.crop_sequence(stem, 2)
        (again,) = fed(model, cache, [stem], [ids[0, 10:12]])
    other = torch.cat((ids[0, :10], ids[1, 10:12]))
    assert models.relative(out_stem, alone(model, ids[0, :12])[10:]) <= 1e-4
    assert models.relative(out_branch, alone(model, other)[10:]) <= 1e-4
    assert torch.equal(again, out_stem) or models.relative(again, out_stem) <= 1e-5
    cache.remove(stem)
    cache.remove(branch)
    assert len(cache.table.free) == 6 and not any(cache.table.users)


def test_the_layer_gives_what_absorbed_decode_takes() -> None:
    """Direct use: update in a batch, then the kernel on the pages, against the reference in float64."""
    cache: Any = PagedLatentCache(models.deepseek_v3(num_hidden_layers=1).config, pages=8, page=4)
    sequences = [cache.add(), cache.add()]
    layer = cache.layers[0]
    with cache.batch(sequences, [7, 3]):
        layer.handover = mla_convert.patches.call.Handover()
        layer.update(torch.randn(2, 1, 7, 40), torch.randn(2, 1, 7, 8))
        stored = layer.handover.fields
    query = torch.randn(2, 1, 3, 40), torch.randn(2, 1, 3, 8)
    found = absorbed_decode(*query, scale=0.2, **stored)
    expected = absorbed_decode_reference(check(DecodeArguments(*query, scale=0.2, **stored)))
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-5)
    assert stored["kv_lens"].tolist() == [7, 3]


def test_the_table_through_random_lives() -> None:
    """Against a plain list of tokens for each sequence, with pages that really hold them."""
    for seed in range(20):
        rng, table = random.Random(seed), PageTable(12, 3)
        pages = [[-1] * 3 for _ in range(12)]
        lives: dict[int, list[int]] = {}
        for step in range(60):
            act = rng.choice(["add", "write", "write", "write", "fork", "crop", "remove"])
            if act == "add" or not lives:
                lives[table.add()] = []
                continue
            some = rng.choice(sorted(lives))
            if act == "fork":
                lives[table.fork(some)] = list(lives[some])
            elif act == "remove":
                table.remove(some)
                del lives[some]
            elif act == "crop":
                count = rng.randint(0, len(lives[some]))
                table.crop(some, count)
                lives[some] = lives[some][: len(lives[some]) - count]
            else:
                chosen = rng.sample(sorted(lives), rng.randint(1, len(lives)))
                counts = [rng.randint(1, 4) for _ in chosen]
                before = (list(table.free), {k: list(v) for k, v in table.held.items()})
                try:
                    copies = table.reserve(chosen, counts)
                except UsageError:
                    assert before == (table.free, table.held)
                    continue
                for source, target in copies:
                    pages[target] = list(pages[source])
                new = [step * 1000 + i for i in range(sum(counts))]
                for slot, token in zip(table.slots(chosen, counts), new, strict=True):
                    pages[slot // 3][slot % 3] = token
                table.advance(chosen, counts)
                for sequence, count in zip(chosen, counts, strict=True):
                    lives[sequence] += [new.pop(0) for _ in range(count)]
            for sequence, tokens in lives.items():
                assert [t for n in table.held[sequence] for t in pages[n]][: len(tokens)] == tokens
            held = [n for numbers in table.held.values() for n in numbers]
            assert [held.count(n) for n in range(12)] == table.users
            assert sorted(table.free) == [n for n in range(12) if n not in held]


@torch.inference_mode()
def test_refusals() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    cache = PagedLatentCache(model.config, pages=2, page=4)
    one = cache.add()
    with pytest.raises(UsageError, match="inside"):
        model(ids, cache=cache)
    with pytest.raises(UsageError, match="3 pages of 4 tokens are needed and 2 of 2"), cache.batch([one], 9):
        pass
    with pytest.raises(UsageError, match="distinct and known"), cache.batch([one, one], 1):
        pass
    with pytest.raises(UsageError, match="at least one new token"), cache.batch([one], 0):
        pass
    with pytest.raises(UsageError, match="called with 1 of 6"), cache.batch([one], 7):
        model(ids, cache=cache)
    with cache.batch([one], 6):
        model(ids, cache=cache)
    assert cache.length(one) == 6
    with pytest.raises(UsageError, match="absorbed path alone"), cache.batch([one], 1):
        model(ids[:, :1], cache=cache)
    with mla_convert.patched(model):
        with pytest.raises(UsageError, match="attention_mask"), cache.batch([one], 2):
            mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
            model(ids[:, :2], cache=cache, attention_mask=mask)
        assert cache.length(one) == 6
    for wrong in (-1, 7):
        with pytest.raises(UsageError, match="cannot be removed"):
            cache.crop_sequence(one, wrong)
    with cache.batch([one], 1), pytest.raises(UsageError, match="a batch is under way"), cache.batch([one], 1):
        pass
    with pytest.raises(UsageError, match="crop_sequence"):
        cache.crop(-1)
    with pytest.raises(UsageError, match="whole number"):
        PagedLatentCache(model.config, pages=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache, one: cache.batch(one, 1), "sequences must be a list of whole numbers, found 1"),
        (lambda cache, one: cache.batch(None, 1), "sequences must be a list"),
        (lambda cache, one: cache.batch("1", 1), "sequences must be a list"),
        (lambda cache, one: cache.batch([[one]], 1), "each of sequences must be a whole number"),
        (lambda cache, one: cache.batch([True], 1), "each of sequences must be a whole number, found True"),
        (lambda cache, one: cache.batch([one], 1.5), "new_tokens must be a whole number, found 1.5"),
        (lambda cache, one: cache.batch([one], True), "new_tokens must be a whole number, found True"),
        (lambda cache, one: cache.batch([one], None), "new_tokens must be a whole number, found None"),
        (lambda cache, one: cache.batch([one], [1.5]), "each of new_tokens must be a whole number"),
        (lambda cache, one: cache.batch([one], "1"), "new_tokens must be a list"),
        (lambda cache, one: cache.batch([one], [1, 1]), "at least one sequence, each"),
        (lambda cache, one: cache.crop_sequence(one, 1.5), "tokens to forget must be a whole number, found 1.5"),
        (lambda cache, one: cache.crop_sequence(one, True), "tokens to forget must be a whole number"),
        (lambda cache, one: cache.length([one]), "each of sequences must be a whole number"),
        (lambda cache, one: cache.fork(None), "each of sequences must be a whole number"),
    ],
)
def test_refuses_what_are_no_numbers(call: Any, words: str) -> None:
    cache = PagedLatentCache(models.deepseek_v3().config, pages=2, page=4)
    one = cache.add()
    with pytest.raises(UsageError, match=words):
        with call(cache, one) or contextlib.nullcontext():
            pass
    with cache.batch(torch.tensor([one]), torch.tensor(3)):  # whole numbers of any library
        assert cache.positions(3).tolist() == [[0, 1, 2]]
    assert cache.length(one) == 0 and len(cache.table.free) == 2


@torch.inference_mode()
def test_what_a_batch_uses_stays_until_its_end() -> None:
    """Neither before the call of the model nor after it; another call would write over the tokens of the first."""
    model, ids = models.deepseek_v3(), models.tokens(2, 8)
    changes: list[Any] = [lambda c, s: c.crop_sequence(s, 1), lambda c, s: c.remove(s), lambda c, s: c.reset()]
    with mla_convert.patched(model):
        cache = PagedLatentCache(model.config, pages=9, page=4)
        one, other = cache.add(), cache.add()
        fed(model, cache, [one, other], [ids[0, :6], ids[1, :6]])
        with cache.batch([one], 1):
            for called in (False, True):
                for change in changes:
                    with pytest.raises(UsageError, match="inside of the batch"):
                        change(cache, one)
                if not called:
                    model(ids[:1, 6:7], cache=cache, position_ids=cache.positions(1))
            with pytest.raises(UsageError, match="the model was called again"):
                model(ids[:1, 7:8], cache=cache, position_ids=cache.positions(1))
            cache.crop_sequence(other, 2)  # it is in no batch
            branch = cache.fork(one)
        assert [cache.length(each) for each in (one, other, branch)] == [7, 4, 6]
        with_seven = fed(model, cache, [one, branch], [ids[0, 7:], ids[0, 6:]])
    assert models.relative(with_seven[0], alone(model, ids[0])[7:]) <= 1e-4
    assert models.relative(with_seven[1], alone(model, ids[0])[6:]) <= 1e-4


def test_refuses_groups_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="40 numbers has no whole groups of 32"):
        PagedLatentCache(models.deepseek_v3().config, pages=2, format="int8:32")


@torch.inference_mode()
def test_refuses_another_model() -> None:
    """Other widths, one layer more, one layer fewer: each is said, before the tokens count."""
    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    for changes, words in (
        ({"kv_lora_rank": 32}, r"\(40, 8\), the new tokens have \(32, 8\)"),
        ({"num_hidden_layers": 3}, "made for a model of 2 layers, and the model has 3"),
        ({"num_hidden_layers": 1}, "made for a model of 2 layers, and the model has 1"),
    ):
        cache = PagedLatentCache(model.config, pages=8, page=4)
        sequence = cache.add()
        with mla_convert.patched(models.deepseek_v3(**changes)) as handle:
            with pytest.raises(UsageError, match=words), cache.batch([sequence], 6):
                handle.model(ids, cache=cache)
        assert cache.length(sequence) == 0 and len(cache.table.free) == 8
    cache = PagedLatentCache(model.config, pages=8, page=4)
    with pytest.raises(UsageError, match="of 2 layers, and layer 2"), cache.batch([cache.add()], 6):
        models.deepseek_v3(num_hidden_layers=3)(ids, cache=cache)


@torch.inference_mode()
def test_a_batch_that_never_calls_the_model_stores_nothing() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 7)
    cache = PagedLatentCache(model.config, pages=4, page=4)
    sequence = cache.add()
    with cache.batch([sequence], 6):
        pass
    assert cache.length(sequence) == 0 and len(cache.table.free) == 4
    with mla_convert.patched(model):
        first = fed(model, cache, [sequence], [ids[0, :6]])[0]
        with pytest.raises(KeyError), cache.batch([sequence], 8):
            raise KeyError
        assert cache.length(sequence) == 6 and len(cache.table.free) == 2
        second = fed(model, cache, [sequence], [ids[0, 6:]])[0]
    assert models.relative(torch.cat((first, second)), alone(model, ids[0])) <= 1e-4


@torch.inference_mode()
def test_a_reset_forgets_all_sequences() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    cache = PagedLatentCache(model.config, pages=2, page=4)
    with mla_convert.patched(model):
        before = cache.add()
        first = fed(model, cache, [before], [ids[0]])[0]
        cache.reset()
        assert len(cache.table.free) == 2 and not any(cache.table.users)
        with pytest.raises(UsageError, match="distinct and known"):
            cache.length(before)
        again = fed(model, cache, [cache.add()], [ids[0]])[0]
    assert models.relative(again, first) <= 1e-5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0])), "reorder_cache .*no common batch.*fork"),
        (lambda cache: cache.batch_repeat_interleave(2), "batch_repeat_interleave .*no common batch"),
        (lambda cache: cache.batch_select_indices(torch.tensor([0])), "batch_select_indices .*no common batch"),
        (lambda cache: cache.offload(0), "offload .*model's device"),
        (lambda cache: cache.prefetch(0), "prefetch .*model's device"),
        (lambda cache: cache.layers[0].offload(), "offload .*model's device"),
        (lambda cache: cache.layers[0].prefetch(), "prefetch .*model's device"),
        (lambda cache: cache.layers[0].reset(), "reset.*all layers"),
        (lambda cache: cache.layers[0].reorder_cache(torch.tensor([0])), "reorder_cache .*fork"),
    ],
)
def test_what_a_common_batch_would_need_is_refused(call: Any, words: str) -> None:
    model = models.deepseek_v3()
    cache = PagedLatentCache(model.config, pages=2, page=4)
    sequence = cache.add()
    with torch.inference_mode(), mla_convert.patched(model):
        fed(model, cache, [sequence], [models.tokens(1, 6)[0]])
    with pytest.raises(UsageError, match=words):
        call(cache)
    assert cache.length(sequence) == 6
