"""Models spread over two processes give what they give in one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import family_models
import models
import older
import parallel_worker as worker
import pytest
import torch
from patching import BOUND
from transformers import AutoModelForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, PreTrainedModel

import mla_convert
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.patches import tp_plan

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 98}


def glm4_moe_lite() -> PreTrainedModel:
    config = Glm4MoeLiteConfig(**models.COMMON | HEADS | {"mlp_layer_types": ["dense", "sparse"]})
    return models._make(Glm4MoeLiteForCausalLM, config, 0, "sdpa", torch.float32)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each process found."""
    folder = tmp_path_factory.mktemp("parallel")
    models.deepseek_v2(**HEADS).save_pretrained(folder / "deepseek_v2")
    models.deepseek_v3(**HEADS).save_pretrained(folder / "deepseek_v3")
    glm4_moe_lite().save_pretrained(folder / "glm4_moe_lite")
    mla_convert.convert(folder / "deepseek_v3", folder / "absorbed")
    # Port 0: the launcher takes a free one.
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run = subprocess.run(
        [sys.executable, *launcher, *rendezvous, worker.__file__, str(folder)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = {case: [torch.load(folder / f"{case}.{rank}.pt") for rank in (0, 1)] for case in worker.CASES}
    for name, processes in found.items():
        expected = AutoModelForCausalLM.from_pretrained(folder / worker.CASES[name][0])
        for process in processes:
            process["expected"] = worker.decode(expected, padded="pp_size" not in worker.CASES[name][1])
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert torch.equal(found["tokens"], expected["tokens"])
    assert models.relative(found["logits"], expected["logits"]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_logits_are_those_of_one_process(outputs: dict[str, list[dict[str, Any]]], case: str) -> None:
    for process in outputs[case]:
        assert_same(process["original"], process["expected"])
        assert_same(process["patched"], process["expected"])
        assert_same(process["edited"], process["unpatched"])
        assert models.relative(process["edited"]["logits"], process["patched"]["logits"]) > 1e-3


#: transformers 5.16 reads a plan in ``DistributedConfig``, and shards by the model's own nevertheless.
ANY_PLAN = older.lacks("plans that are not the model's own")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=ANY_PLAN) if case == "v3-our-plan" else case for case in worker.CASES]
)
def test_each_process_absorbs_its_own_part(outputs: dict[str, list[dict[str, Any]]], case: str) -> None:
    first, second = outputs[case]
    both = {f"model.layers.{i}.self_attn" for i in range(2)}
    if case == "v3-pipeline":
        assert [first["heads"], second["heads"]] == [{f"model.layers.{i}.self_attn": 4} for i in range(2)]
        return
    heads = 4 if case == "v3-own-plan" else 2
    assert first["heads"] == second["heads"] == dict.fromkeys(both, heads)
    sharded = "through this process's shard" in first["description"]
    assert sharded == (case != "v3-own-plan")
    refused = "cannot be fused: it is sharded over processes"
    assert (refused in first["fused"]) == sharded


@pytest.mark.slow
@ANY_PLAN
def test_weights_of_a_folder_are_for_whole_models(outputs: dict[str, list[dict[str, Any]]]) -> None:
    assert "kv_b_proj is sharded over processes" in outputs["v3-our-plan"][0]["folder"]
    assert "leave the folder out" in outputs["v3-our-plan"][0]["folder"]
    assert outputs["v3-own-plan"][0]["folder"] == ""


def test_the_plan() -> None:
    model = models.deepseek_v3()
    plan = tp_plan(model)
    attention = {name.rsplit(".", 1)[1]: style for name, style in plan.items() if ".self_attn." in name}
    assert attention == {
        "q_b_proj": "colwise",
        "kv_a_proj_with_mqa": "mla_kv_a_proj",
        "kv_b_proj": "colwise",
        "o_proj": "rowwise",
    }
    assert plan == tp_plan(model.config) == model.tp_plan | plan
    assert "model.layers.*.self_attn.q_proj" in tp_plan(models.deepseek_v3(q_lora_rank=None))
    assert tp_plan(models.deepseek_v2()) == models.deepseek_v2().tp_plan


@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
def test_the_plan_of_a_config_is_that_of_its_model(model_type: str) -> None:
    """Of wrappers too, whose text model is not where it is in a text model alone."""

    def outcome(of: Any) -> Any:
        try:
            return tp_plan(of)
        except UnsupportedModelError as error:
            return str(error)

    model = family_models.make(model_type)
    model.config.architectures = [type(model).__name__]
    assert outcome(model.config) == outcome(model)


def test_what_has_no_plan() -> None:
    with pytest.raises(UsageError, match="takes a transformers model or its config, found Linear"):
        tp_plan(torch.nn.Linear(2, 2))
    model = models.deepseek_v3()
    model.model.layers[0].self_attn.gate = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="self_attn has gate, which may belong to heads"):
        tp_plan(model)


def test_shards_that_cut_through_a_head() -> None:
    model = models.deepseek_v3()
    projection = model.model.layers[1].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach()[:42])
    with pytest.raises(PatchError, match="42 rows here, which are not whole heads of 16 \\+ 12"):
        mla_convert.patch(model)


def test_a_plan_is_refused_for_a_patched_model() -> None:
    model = models.deepseek_v3()
    with mla_convert.patched(model), pytest.raises(PatchError, match="patched"):
        tp_plan(model)
