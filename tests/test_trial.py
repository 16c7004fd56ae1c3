"""Configs that load and do not run are refused before anything is compared or timed."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import models
import pytest
import torch

from mla_convert.benchmark import bench
from mla_convert.errors import CheckpointError, MLAConvertError, UsageError
from mla_convert.verification import verify

BROKEN: list[dict[str, Any]] = [
    {"n_group": 3},
    {"n_group": 0},
    {"num_key_value_heads": 1},
    {"topk_group": 9},
    {"num_experts_per_tok": 100},
    {"head_dim": 4},
]


@pytest.mark.parametrize("changes", BROKEN, ids=str)
def test_configs_that_contradict_themselves(changes: dict[str, Any]) -> None:
    model = models.deepseek_v3(**changes)
    for run in (lambda: verify(model, prefill=4, decode=3, batch=2), lambda: bench(model, contexts=[8], repetitions=3)):
        with pytest.raises(CheckpointError, match="cannot compute two tokens .* the config contradicts itself"):
            run()
    with torch.inference_mode(), pytest.raises((RuntimeError, ArithmeticError)):
        model(models.tokens(1, 2))  # the model was left as it was


@pytest.mark.parametrize("length", [0, 1e308, 0.5])
def test_lengths_of_a_native_config(native_path: pathlib.Path, tmp_path: pathlib.Path, length: float) -> None:
    shutil.copytree(native_path, tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"original_seq_len": length, "max_seq_len": 1e308}))
    for run in (lambda p: verify(p, prefill=4, decode=3, batch=2), lambda p: bench(p, contexts=[8], repetitions=3)):
        with pytest.raises(MLAConvertError, match=r"config|max_position_embeddings"):
            run(tmp_path / "source")


def test_logits_that_are_no_numbers() -> None:
    model = models.deepseek_v3()
    model.lm_head.weight.data[5, 0] = torch.nan
    with pytest.raises(CheckpointError, match="unpatched as it is, gives [0-9,]+ NaN or infinite logits"):
        verify(model, prefill=4, decode=3, batch=2)


def test_caches_of_a_sliding_window() -> None:
    model = models.deepseek_v3()
    model.config.sliding_window = 4
    with pytest.raises(UsageError, match="sliding window"):
        bench(model, contexts=[8], repetitions=3)
