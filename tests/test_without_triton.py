"""Where triton is not installed (macOS, Windows), everything else works."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys
    sys.modules["triton"] = None
    import importlib.util
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else found(name, *rest)
    import torch
    import models
    from transformers import DynamicCache
    import mla_convert
    from mla_convert.errors import UsageError
    from mla_convert.kernels import dispatch

    model, ids = models.deepseek_v3(), models.tokens(1, 6)
    with torch.inference_mode():
        expected = model(ids).logits
        with mla_convert.patched(model) as handle:
            cache = DynamicCache()
            logits = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(6)], 1)
            handle.warmup()
            print(handle.describe().backend)
    assert models.relative(logits, expected) <= 1e-4
    assert dispatch.choose_backend("auto", torch.device("cuda")) == "torch"
    try:
        mla_convert.patch(model, backend="triton")
    except UsageError as error:
        print(error)
"""


def test_without_triton() -> None:
    tests = __file__.rpartition("/")[0]
    program = f"import sys; sys.path.insert(0, {tests!r})\n" + textwrap.dedent(PROGRAM)
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    backend, refusal = run.stdout.splitlines()
    assert backend.startswith("torch") and "needs the triton package" in refusal
