"""Models whose original attention is flex attention: uncompiled for the forms of masks, compiled in a process apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from patching import BOUND, steps
from torch.nn.attention import flex_attention as flex
from transformers import DynamicCache, StaticCache, masking_utils
from transformers.integrations import flex_attention as integration

import mla_convert

# Uncompiled, flex attention says that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
SIZES = [8, 3, 1, 1, 2, 1]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions without PyTorch's compiler, which takes half a minute for each shape."""

    def plain(*args: Any, training: bool = False, **given: Any) -> Any:
        return flex.flex_attention(*args, **given)

    def blocks(*args: Any, **given: Any) -> Any:
        return flex.create_block_mask(*args, **given | {"_compile": False})

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", plain)
    monkeypatch.setattr(masking_utils, "create_block_mask", blocks)


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def static(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=40)


@pytest.mark.parametrize("cache", [lambda model: DynamicCache(), static], ids=["dynamic", "static"])
@pytest.mark.parametrize("threshold", [0, 50], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@torch.inference_mode()
@pytest.mark.usefixtures("uncompiled")
def test_over_flex_attention(padded: bool, threshold: int, cache: Callable[[Any], Any]) -> None:
    """Several sequences; prefill, several new tokens and single ones."""
    ids, mask = models.tokens(2, 16), padding(2, 16)
    masked, real = ({"attention_mask": mask}, mask.bool()) if padded else ({}, mask >= 0)
    reference, model = models.deepseek_v3(), models.deepseek_v3(attn="flex_attention")
    expected = steps(reference, ids, cache(reference), SIZES, **masked)
    with mla_convert.patched(model, prefill_threshold=threshold):
        found = steps(model, ids, cache(model), SIZES, **masked)
    assert models.relative(found[real], expected[real]) <= BOUND


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@torch.inference_mode()
@pytest.mark.usefixtures("uncompiled")
def test_a_mask_of_the_caller_s_own(kind: torch.dtype) -> None:
    """One for all sequences, in which some tokens see none but themselves."""
    ids, seen = models.tokens(2, 9), torch.ones(9, 9, dtype=torch.bool).tril()
    seen[5] = torch.arange(9) == 5
    given = seen[None, None] if kind == torch.bool else torch.zeros(1, 1, 9, 9).masked_fill(~seen, -1e9)
    expected = models.deepseek_v3()(ids, attention_mask=given).logits
    model = models.deepseek_v3(attn="flex_attention")
    with mla_convert.patched(model, prefill_threshold=0):
        assert models.relative(model(ids, attention_mask=given).logits, expected) <= BOUND


SCRIPT = """
import sys
import torch, models, mla_convert
from patching import steps
from transformers import DynamicCache

mask = torch.ones(2, 12, dtype=torch.long)
mask[0, :3] = 0
masked, sizes = ({"attention_mask": mask}, [12]) if sys.argv[1] == "padded" else ({}, [7, 4, 1])
shape = dict(num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=24, v_head_dim=16)
found = []
for attn in ("sdpa", "flex_attention"):
    model, ids = models.deepseek_v3(attn=attn, **shape), models.tokens(2, 12)
    with torch.inference_mode(), mla_convert.patched(model, prefill_threshold=0):
        found.append(steps(model, ids, DynamicCache(), sizes, **masked)[:, 3:])
print("difference", models.relative(*found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "padded"])
def test_compiled_flex_attention(case: str) -> None:
    """On a CPU PyTorch compiles it to C++, in which a wrong mask overwrites memory and ends the process."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r})\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code, case], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split("difference")[1]) <= BOUND
