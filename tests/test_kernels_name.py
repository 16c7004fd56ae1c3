"""The repository's folder ``kernels`` never stands in for Hugging Face's package of that name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "kernels"

WHERE = "import kernels; print(kernels.__file__)"
LOAD_A_MODEL = """
import kernels
from pathlib import Path
from transformers import AutoModelForCausalLM
import mla_convert.kernels

example = Path(mla_convert.__file__).parent / "example"
model = AutoModelForCausalLM.from_pretrained(example)
print(kernels.__file__)
print(mla_convert.kernels.__file__)
print(type(model).__name__)
"""


def python_in_root(*arguments: str) -> list[str]:
    """Run Python in the repository root, which is on ``sys.path`` as under ``python cli.py``; return the lines."""
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "HOME": str(Path.home())}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_trap_is_real() -> None:
    """Without a cure the bare name is ours there; otherwise the tests below would hold nothing."""
    assert python_in_root("-c", WHERE) == [str(OURS / "__init__.py")]


@pytest.mark.parametrize(
    "cure",
    [
        pytest.param("import runpy; runpy.run_path('cli.py')", marks=pytest.mark.slow, id="python cli.py"),
        pytest.param("from mla_convert.__main__ import leave_checkout; leave_checkout()", id="python -m mla_convert"),
    ],
)
def test_a_model_loads_from_the_repository_root(cure: str) -> None:
    huggingface, ours, model = python_in_root("-c", cure + LOAD_A_MODEL)
    assert Path(huggingface).parent != OURS and Path(huggingface).parent.parent.name == "site-packages"
    assert Path(ours) == OURS / "__init__.py"
    assert model == "DeepseekV3ForCausalLM"


def test_pytest_itself_is_cured() -> None:
    assert not [entry for entry in sys.path if Path(entry).resolve() == ROOT]
    found = importlib.import_module("kernels").__file__
    assert found is not None and Path(found).parent != OURS
