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
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, FormatError, MLAConvertError, UsageError
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
    with pytest.raises(CheckpointError, match="cannot compute two tokens .* the config contradicts itself"):
        verify(model, prefill=4, decode=3, batch=2)
    with torch.inference_mode(), pytest.raises((RuntimeError, ArithmeticError)):
        model(models.tokens(1, 2))  # the model was left as it was


def test_bench_refuses_what_verify_refuses() -> None:
    with pytest.raises(CheckpointError, match="cannot compute two tokens .* the config contradicts itself"):
        bench(models.deepseek_v3(**BROKEN[0]), contexts=[8], repetitions=3)


@pytest.mark.parametrize("length", [0, 1e308, 0.5])
def test_lengths_of_a_native_config(native_path: pathlib.Path, tmp_path: pathlib.Path, length: float) -> None:
    shutil.copytree(native_path, tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"original_seq_len": length, "max_seq_len": 1e308}))
    with pytest.raises(MLAConvertError, match=r"config|max_position_embeddings"):
        verify(tmp_path / "source", prefill=4, decode=3, batch=2)
    with pytest.raises(MLAConvertError, match=r"config|max_position_embeddings"):
        bench(tmp_path / "source", contexts=[8], repetitions=3)


NOT_NUMBERS = "unpatched as it is, gives [0-9,]+ NaN or infinite logits .of [0-9,]+. in float32"
FINITE = NOT_NUMBERS + ": all its weights are finite, so its config is damaged, or the dtype too narrow"


def test_logits_that_are_no_numbers() -> None:
    model = models.deepseek_v3()
    model.lm_head.weight.data[5, 0] = torch.nan
    named = NOT_NUMBERS + r": NaN or infinite weights: lm_head.weight has 1 .of 4,656.; the checkpoint is damaged"
    with pytest.raises(CheckpointError, match=named):
        verify(model, prefill=4, decode=3, batch=2)
    with pytest.raises(CheckpointError, match=named):
        bench(model, contexts=[8], repetitions=3)


def test_the_first_damaged_weights_are_named_and_the_rest_counted() -> None:
    model = models.deepseek_v3()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[:2, :2] = torch.inf
        layer.input_layernorm.weight.data[0] = torch.nan
    model.model.layers[1].mlp.gate.e_score_correction_bias[1] = torch.nan  # a buffer, and stored
    with pytest.raises(CheckpointError) as refused:
        verify(model, prefill=4, decode=3, batch=2)
    for words in ("layers.0.self_attn.o_proj.weight has 4 (of 1,728)", "layers.0.input_layernorm.weight has 1 (of 48)"):
        assert words in str(refused.value)
    assert "and 2 more tensors have some; the checkpoint is damaged, fetch it again" in str(refused.value)


@pytest.mark.parametrize("projection", ["q_b_proj", "o_proj"])
def test_damage_that_factored_conversion_does_not_read(projection: str, tmp_path: pathlib.Path) -> None:
    """It is left to verify; the fused form reads these tensors, and convert refuses them."""
    model = models.deepseek_v3()
    getattr(model.model.layers[1].self_attn, projection).weight.data[3, 2] = torch.nan
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", form="factored")
    with pytest.raises(CheckpointError, match=rf"{NOT_NUMBERS}: .*layers.1.self_attn.{projection}.weight has 1 "):
        verify(tmp_path / "source", tmp_path / "out", prefill=4, decode=3, batch=2)
    with pytest.raises(CheckpointError, match=rf"{projection}.*(NaN|not finite|infinit)"):
        convert(tmp_path / "source", tmp_path / "fused", form="fused")
    assert not (tmp_path / "fused").exists()


@pytest.mark.parametrize("norm", ["kv_a_layernorm", "q_a_layernorm"])
@pytest.mark.parametrize("form", ["factored", "fused"])
def test_damaged_norms_are_refused_by_convert(norm: str, form: str, tmp_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    getattr(model.model.layers[1].self_attn, norm).weight.data[3:5] = torch.inf
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(FormatError, match=rf"layers.1.self_attn.{norm}.weight has 2 NaN or infinite values"):
        convert(tmp_path / "source", tmp_path / "out", form=form)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:.*factor")
def test_a_yarn_factor_of_zero() -> None:
    """Positions divided by zero: transformers warns, and computes NaN."""
    model = models.deepseek_v3(rope_parameters=models.YARN | {"factor": 0.0})
    for run in (lambda: verify(model, prefill=4, decode=3, batch=2), lambda: bench(model, contexts=[8], repetitions=3)):
        with pytest.raises(CheckpointError, match=FINITE):
            run()


def test_caches_of_a_sliding_window() -> None:
    model = models.deepseek_v3()
    model.config.sliding_window = 4
    with pytest.raises(UsageError, match="sliding window"):
        bench(model, contexts=[8], repetitions=3)
