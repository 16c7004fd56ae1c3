"""The tool that made the example checkpoint still makes one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import mla_convert

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = Path(mla_convert.__file__).parent / "example"
IGNORED = {"transformers_version"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", ROOT / "tools" / "train_example.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", ["deepseek_v3", "deepseek_v2"])
def test_two_steps_give_a_checkpoint_that_loads(tool: ModuleType, arch: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    budget = "--steps 2 --sequence 64 --batch 2 --characters 60000 --held-out 256"
    tool.main([str(out), "--arch", arch, *budget.split()])
    assert len(list(out.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([AutoTokenizer.from_pretrained(out).encode((out / "held_out.txt").read_text("utf-8"))[:32]])
    assert torch.isfinite(model(ids).logits).all()
    if arch == "deepseek_v3":
        assert_same_kind(out)


def assert_same_kind(out: Path) -> None:
    """The example that is shipped has the config and the tensors that the tool gives today."""
    made, shipped = (json.loads((folder / "config.json").read_text("utf-8")) for folder in (out, EXAMPLE))
    assert {k: v for k, v in made.items() if k not in IGNORED} == {k: v for k, v in shipped.items() if k not in IGNORED}
    assert shapes(out) == shapes(EXAMPLE)


def shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    found = {}
    for path in folder.glob("model-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                view = file.get_slice(name)
                found[name] = (view.get_shape(), view.get_dtype())
    return found


def test_training_lowers_the_loss(tool: ModuleType) -> None:
    """A sequence that repeats is learnt; the perplexity of guessing would be the vocabulary's 1,024."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tool.model_config("deepseek_v3"))
    ids = torch.arange(2048) % 16
    before = tool.perplexity(model, ids, 64)
    assert tool.train(model, ids, tool.Recipe(steps=20, sequence=64, batch=2, warm_up=5)) == 20
    assert tool.perplexity(model, ids, 64) < before / 10


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth(tool: ModuleType) -> None:
    recipe = tool.Recipe(learning_rate=1.0, warm_up=10)
    assert tool.learning_rate(recipe, 0, 0.0) == pytest.approx(0.1)
    assert tool.learning_rate(recipe, 9, 0.0) == pytest.approx(1.0)
    assert tool.learning_rate(recipe, 1000, 1.0) == pytest.approx(0.05)


def test_an_existing_folder_is_refused(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main([str(tmp_path)])
    assert "exists already" in capsys.readouterr().err
