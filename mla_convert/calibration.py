"""What absorbed weights meet when a model reads a text: second moments of their inputs, layer by layer.

The model runs patched, with everything absorbed, so that the inputs are there to be seen: content queries, cached
latents and averaged latents. Windows go to two halves in turns: one half of the text chooses codes, the other judges.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert import quality
from mla_convert.checkpoint import Checkpoint
from mla_convert.compensation import Chooser, Moments
from mla_convert.errors import UsageError
from mla_convert.patches.apply import patched
from mla_convert.patches.layer import layer_of
from mla_convert.patches.loading import load_original
from mla_convert.patches.modules import query_name
from mla_convert.patches.recognition import attention_modules
from mla_convert.prompts import read_prompts
from mla_convert.quality import WINDOW, cut_windows
from mla_convert.quantization import Quantized, quantize
from mla_convert.quiet import no_loading_bars
from mla_convert.schemes import Scheme

#: The most windows of a text that are read, both halves together.
MOST = 256
_BATCH = 4
#: Tokens in a row by which two texts are the same text.
RUN = 64


def shared_windows(ours: Tensor, theirs: Tensor) -> int:
    """How many of the windows ``ours`` int64 [n, S] have RUN tokens in a row that occur in ``theirs`` [m, S]."""
    factors = torch.randint(-(2**62), 2**62, (RUN,), generator=torch.Generator().manual_seed(0)) | 1

    def prints(ids: Tensor) -> Tensor:
        return (ids.unfold(1, RUN, 1) * factors).sum(dim=-1)  # modulo 2 ** 64: equal by chance once in that many pairs

    return int(torch.isin(prints(ours), prints(theirs)).any(dim=1).sum())


class Calibration:
    """The codes of each layer's tensors as a text would have them; a :data:`mla_convert.coding.Rounder`.

    ``tag`` names what the choice depends on beside the checkpoint. The model is run when the first codes are asked for.
    Layers that it does not run (those for multi-token prediction) are rounded to nearest.

    Raises:
        UsageError: the text cannot be read or is shorter than two windows, has passages of the held-out text that
            results are reported on, or there is no tokenizer.
    """

    def __init__(self, checkpoint: Checkpoint, text: str | os.PathLike[str]) -> None:
        self.checkpoint = checkpoint
        vocabulary = int(checkpoint.config["vocab_size"])
        self.windows = cut_windows(read_prompts(checkpoint.path, vocabulary, text), MOST)
        held_out, reported = quality.held_out_windows(checkpoint.path, vocabulary)
        if shared := shared_windows(self.windows.ids, reported.ids):
            raise UsageError(
                f"{shared} of the {len(self.windows.ids)} windows of {os.fspath(text)} have {RUN} tokens in a row or "
                f"more in common with the held-out {held_out.origin}, which results are reported on; give another text"
            )
        count = len(self.windows.ids)
        if count < 2:
            raise UsageError(f"{os.fspath(text)} has less than two windows of {WINDOW} tokens; give a longer text")
        self.tag = f"{hashlib.sha256(pathlib.Path(text).read_bytes()).hexdigest()} {count}"
        self.description = f"calibrated on {count - count // 2} windows of {os.fspath(text)}, judged on {count // 2}"
        self._choosers: dict[int, Chooser] | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, index: int, key: str, weight: Tensor, scheme: Scheme) -> tuple[Quantized, str]:
        """Choose the codes of the tensor under ``key`` of layer ``index``."""
        choosers = self._found()
        if index not in choosers:
            return quantize(weight, scheme), "nearest"
        return choosers[index].choose(key, weight.cpu(), scheme)

    def _found(self) -> dict[int, Chooser]:
        """What the one run of the model found, or its error, whichever thread it was that ran it."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._choosers is None:
                try:
                    self._choosers = self._run()
                except BaseException as error:
                    self._error = error
                    raise
            return self._choosers

    def _run(self) -> dict[int, Chooser]:
        with no_loading_bars():
            model = load_original(self.checkpoint.path, dtype=torch.float32)
        fit, judge = (collect(model, self.windows.ids[half::2]) for half in (0, 1))
        return {index: Chooser(geometry, moments, judge[index][1]) for index, (geometry, moments) in fit.items()}


@torch.no_grad()
def collect(model: Any, ids: Tensor) -> dict[int, tuple[Any, Moments]]:
    """By layer, its geometry and the moments of what its absorbed weights meet in windows ``ids`` [n, S]."""
    with patched(model, form="factored", prefill_threshold=ids.shape[1]):
        with contextlib.ExitStack() as stack:
            meters = [stack.enter_context(_metered(module)) for _, module in attention_modules(model)]
            for start in range(0, len(ids), _BATCH):
                model(ids[start : start + _BATCH].to(model.device), use_cache=False)
        return {meter.index: (meter.geometry, meter.moments()) for meter in meters}


class _Meter:
    """Running sums of one layer's second moments."""

    def __init__(self, module: Any) -> None:
        layer = layer_of(module)
        assert layer is not None
        self.index = int(module.layer_idx)
        self.geometry = layer.geometry
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.latents: Tensor | float = 0.0

    def add(self, name: str, rows: Tensor) -> None:
        """Rows [heads, n, k]."""
        rows = rows.float()
        self.sums[name] = self.sums.get(name, 0) + rows.transpose(1, 2) @ rows
        self.counts[name] = self.counts.get(name, 0) + rows.shape[1]

    def moments(self) -> Moments:
        """Means of all that was added."""
        found = {name: total / self.counts[name] for name, total in self.sums.items()}
        mean = torch.as_tensor(self.latents) / self.counts["latent"]
        latent = found["latent"][0] - torch.outer(mean, mean)
        return Moments(found["query"].cpu(), latent.cpu(), found["output"].cpu(), found["rank"][0].cpu())

    def add_latents(self, latent: Tensor) -> None:
        """Cached latents [B, T, C]."""
        flat = latent.flatten(0, 1).float()
        self.add("latent", flat[None])
        self.latents = self.latents + flat.sum(dim=0)


@contextlib.contextmanager
def _metered(module: nn.Module) -> Iterator[_Meter]:
    """Count what passes one patched attention module, for the length of a ``with`` block; results stay the same."""
    layer: Any = layer_of(module)
    meter = _Meter(module)

    def lift_query(q_nope: Tensor, inner: Callable[[Tensor], Tensor] = layer.lift_query) -> Tensor:
        meter.add("query", q_nope.transpose(0, 1).flatten(1, 2))
        return inner(q_nope)

    def lift_output(out: Tensor, inner: Callable[[Tensor], Tensor] = layer.lift_output) -> Tensor:
        meter.add("output", out.permute(2, 0, 1, 3).flatten(1, 2))
        return inner(out)

    def attend(query: Tensor, latent: Tensor, *args: Any, inner: Any = layer.attend, **kwargs: Any) -> Tensor:
        meter.add_latents(latent)
        result: Tensor = inner(query, latent, *args, **kwargs)
        return result

    projection: Any = getattr(module, query_name(module))
    hook = projection.register_forward_hook(lambda _m, given, _out: meter.add("rank", given[0].flatten(0, 1)[None]))
    hidden = {"lift_query": lift_query, "lift_output": lift_output, "attend": attend}
    layer.__dict__.update(hidden)
    try:
        yield meter
    finally:
        hook.remove()
        for name in hidden:
            del layer.__dict__[name]
