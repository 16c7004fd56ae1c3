"""Train a small DeepSeek-style language model on the Python standard library's own source.

This is how ``mla_convert/example`` was made, with the defaults below on two CPU cores. A trained
model has logits that mean something (perplexity, top-1 agreement, greedy text), which random
weights have not. The result depends on the interpreter's library, on the speed of the machine and
on the releases used, so a new run gives a model of the same kind and not the same bytes.

    python tools/train_example.py OUT [--arch deepseek_v2] [--minutes 25]

OUT gets what ``save_pretrained`` writes, in bfloat16 and shards of 2 MB, with the tokenizer and
``held_out.txt``, text of the same source that was not trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

END_OF_FILE = "\n<|end|>\n"
LEFT_OUT = {"site-packages", "test", "idlelib", "encodings"}
SPECIAL_TOKENS = ["<bos>", "<eos>", "<pad>"]

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
# With mscale_all_dim the softmax scale carries mscale², as in DeepSeek-V3 itself.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How long and how fast to train.

    ``steps`` replaces ``minutes`` where it is given. ``characters`` of source text are read, and
    their last ``held_out`` tokens kept apart.
    """

    minutes: float = 25.0
    steps: int | None = None
    sequence: int = 512
    batch: int = 8
    learning_rate: float = 3e-3
    warm_up: int = 100
    characters: int = 12_000_000
    held_out: int = 40_000
    seed: int = 0


def model_config(arch: str) -> PreTrainedConfig:
    """The shape of the example for ``deepseek_v3`` (query rank, YaRN) or ``deepseek_v2`` (neither)."""
    if arch == "deepseek_v3":
        groups: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        return DeepseekV3Config(**SHAPE, **groups, q_lora_rank=96, rope_parameters=dict(YARN))
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    return DeepseekV2Config(**SHAPE, **groups, q_lora_rank=None, topk_method="greedy")


def source_text(characters: int) -> str:
    """The first characters of the standard library's modules, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    length = 0
    for path in sorted(root.rglob("*.py")):
        if length >= characters:
            break
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            parts.append(path.read_text("utf-8", "ignore") + END_OF_FILE)
            length += len(parts[-1])
    return "".join(parts)[:characters]


def train_tokenizer(text: str) -> Tokenizer:
    """A byte-level BPE of the model's vocabulary, from the text's first two million characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:2_000_000]], trainer)
    return tokenizer


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Linear warm-up over steps, then a cosine over ``progress`` in [0, 1] down to a twentieth."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return recipe.learning_rate * min(1.0, (step + 1) / recipe.warm_up) * (0.05 + 0.95 * cosine)


def schedule(recipe: Recipe) -> Iterator[tuple[int, float]]:
    """(step, progress) until the minutes, or the steps where they are given, are used up."""
    start = time.monotonic()
    for step in itertools.count():
        progress = (time.monotonic() - start) / (recipe.minutes * 60) if recipe.steps is None else step / recipe.steps
        if progress >= 1:
            return
        yield step, progress


def train(model: PreTrainedModel, ids: torch.Tensor, recipe: Recipe) -> int:
    """Train in place on random windows of ``ids`` [tokens]; return the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    done = 0
    for step, progress in schedule(recipe):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, progress)
        starts = torch.randint(0, len(ids) - recipe.sequence, (recipe.batch,))
        batch = torch.stack([ids[start : start + recipe.sequence] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if done % 50 == 0:
            print(f"step {done}: loss {loss.item():.3f}, {progress:.0%} of the budget", flush=True)
    return done


@torch.inference_mode()
def perplexity(model: PreTrainedModel, ids: torch.Tensor, sequence: int) -> float:
    """Perplexity over at most 32 whole windows of ``ids`` [tokens]."""
    model.eval()
    windows = ids[: len(ids) // sequence * sequence].view(-1, sequence)[:32]
    losses = [model(input_ids=window[None], labels=window[None], use_cache=False).loss.item() for window in windows]
    return math.exp(sum(losses) / len(losses))


def save(model: PreTrainedModel, tokenizer: Tokenizer, held_out: torch.Tensor, out: Path) -> None:
    """Write the model in bfloat16, the tokenizer, and the held-out tokens as text."""
    model.to(torch.bfloat16).save_pretrained(out, max_shard_size="2MB")
    bos, eos, pad = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    ).save_pretrained(out)
    (out / "held_out.txt").write_text(tokenizer.decode(held_out.tolist()), "utf-8")


def make_example(arch: str, out: Path, recipe: Recipe) -> float:
    """Train and save one model; return its held-out perplexity."""
    torch.manual_seed(recipe.seed)
    text = source_text(recipe.characters)
    tokenizer = train_tokenizer(text)
    ids = torch.tensor(tokenizer.encode(text).ids)
    known, held_out = ids[: -recipe.held_out], ids[-recipe.held_out :]
    model = AutoModelForCausalLM.from_config(model_config(arch), attn_implementation="sdpa")
    print(f"{len(known):,} tokens, {model.num_parameters():,} parameters", flush=True)
    steps = train(model, known, recipe)
    result = perplexity(model, held_out, recipe.sequence)
    save(model, tokenizer, held_out, out)
    print(f"held-out perplexity {result:.3f} after {steps} steps, written to {out}")
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--arch", choices=("deepseek_v3", "deepseek_v2"), default="deepseek_v3")
    defaults = Recipe()
    for field in dataclasses.fields(Recipe):
        kind = float if field.name in ("minutes", "learning_rate") else int
        default = getattr(defaults, field.name)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default, help=f"default: {default}")
    options = vars(parser.parse_args(arguments))
    arch, out = options.pop("arch"), options.pop("out")
    if out.exists():
        parser.error(f"{out} exists already and nothing is overwritten; give a new folder")
    make_example(arch, out, Recipe(**options))


if __name__ == "__main__":
    main()
