"""The ways in which a model is run for a comparison, always on given tokens (teacher forcing).

Every stage feeds the same tokens to each model and keeps the logits at every position: what a model would have chosen
never comes into it, so that one difference does not hide all that follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mla_convert.patches.layer import layer_of


@dataclasses.dataclass(frozen=True)
class Stage:
    """One schedule over tokens [B, T]: the first ``prefill`` at once, then ``block`` at a time.

    ``padding`` int64 [B] is how many tokens at the left of each sequence count for nothing; what stands there is text
    all the same, so that a mask that is ignored shows. Positions from ``begin`` on are compared.
    """

    name: str
    ids: Tensor
    prefill: int
    block: int = 1
    padding: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """bool [B, T]: the positions that are no padding."""
        if self.padding is None:
            return torch.ones(self.ids.shape, dtype=torch.bool)
        return torch.arange(self.ids.shape[1]) >= self.padding[:, None]

    @property
    def decodes(self) -> bool:
        """Whether anything comes after the prefill."""
        return self.prefill < self.ids.shape[1]

    def cuts(self) -> list[tuple[int, int]]:
        """First and last position (exclusive) of each call."""
        total = self.ids.shape[1]
        starts = [0, *range(self.prefill, total, self.block)]
        return list(zip(starts, [*starts[1:], total], strict=True))

    def parts(self) -> dict[str, tuple[int, int]]:
        """What is judged by itself: a name, and first and last position. The prefill only where padding is tried."""
        total = self.ids.shape[1]
        if not self.decodes:
            return {self.name: (0, total)}
        if self.padding is None:
            return {self.name: (self.prefill, total)}
        return {f"{self.name} prefill": (0, self.prefill), f"{self.name} decode": (self.prefill, total)}


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What one model gave in one stage: ``logits`` float32 [B, T, vocabulary]; ``routes`` by router: int [B, T, k]."""

    logits: Tensor
    routes: dict[str, Tensor]

    def rerouted(self, other: Outputs) -> Tensor:
        """bool [B, T]: where any router picked other experts than in ``other``."""
        moved = torch.zeros(self.logits.shape[:2], dtype=torch.bool)
        for name in self.routes.keys() & other.routes.keys():
            moved |= (self.routes[name] != other.routes[name]).any(dim=-1)
        return moved


@torch.no_grad()
def run(model: Any, stage: Stage, *, whole: bool = False, tick: Callable[[], None] = lambda: None) -> Outputs:
    """Run ``model`` through ``stage``; ``whole`` takes all tokens in one call, without a cache."""
    total = stage.ids.shape[1]
    cache = None if whole else DynamicCache(config=model.config)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, real = stage.ids.to(model.device), stage.real.to(model.device)
    logits = []
    with watched_routers(model) as routers:
        for start, stop in [(0, total)] if whole else stage.cuts():
            given: dict[str, Any] = {"input_ids": ids[:, start:stop], "use_cache": not whole, keyword: cache}
            if stage.padding is not None:
                given["attention_mask"] = real[:, :stop].long()
                given["position_ids"] = (real[:, :stop].cumsum(dim=1) - 1).clamp(min=0)[:, start:]
            logits.append(model(**given).logits.float().cpu())
            routers.cut(ids.shape[0], stop - start)
            tick()
    return Outputs(torch.cat(logits, dim=1), routers.joined())


class Routers:
    """Which experts the routers of a model picked, in call order.

    A router is a module whose class is called a router or a gate and that returns whole numbers, the experts' [B·S, k],
    among its outputs: so transformers writes them. One that is not called once for every token is left out.
    """

    def __init__(self) -> None:
        self.latest: dict[str, list[Tensor]] = {}
        self.picked: dict[str, list[Tensor]] = {}
        self.unclear: set[str] = set()

    def note(self, name: str, output: Any) -> None:
        """Remember what router ``name`` returned."""
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() >= 2:
                self.latest.setdefault(name, []).append(value)

    def cut(self, batch: int, q_len: int) -> None:
        """End a call of ``batch`` × ``q_len`` tokens."""
        for name, found in self.latest.items():
            if len(found) == 1 and found[0].shape[:-1].numel() == batch * q_len:
                picked = found[0].reshape(batch, q_len, -1).sort(dim=-1).values  # experts have no order
                self.picked.setdefault(name, []).append(picked.cpu())
            else:
                self.unclear.add(name)
        self.latest = {}

    def joined(self) -> dict[str, Tensor]:
        """By router, sorted expert numbers [B, T, k] of all calls."""
        return {name: torch.cat(parts, dim=1) for name, parts in self.picked.items() if name not in self.unclear}


@contextlib.contextmanager
def watched_routers(model: nn.Module) -> Iterator[Routers]:
    """Forward hooks on all routers, for the length of a ``with`` block."""
    routers = Routers()
    hooks = []
    for name, module in model.named_modules():
        if any(word in type(module).__name__.lower() for word in ("router", "gate")):
            hooks.append(module.register_forward_hook(lambda _m, _a, out, name=name: routers.note(name, out)))
    try:
        yield routers
    finally:
        for hook in hooks:
            hook.remove()


@dataclasses.dataclass
class Calls:
    """Calls of the patched attention modules, by name: all, and those that computed attention in latent space."""

    all: dict[str, int]
    absorbed: dict[str, int]

    @property
    def idle(self) -> list[str]:
        """Modules in which no call ran absorbed."""
        return [name for name, count in self.absorbed.items() if not count]


@contextlib.contextmanager
def counted_calls(model: nn.Module) -> Iterator[Calls]:
    """Count, for the length of a ``with`` block, what a patched model's attention modules do; results stay the same.

    What is counted is the computation itself (``AbsorbedLayer.attend``), not the decision for it.
    """
    patched = [(module, layer) for module in model.modules() if (layer := layer_of(module)) is not None]
    names = [layer.name for _, layer in patched]
    calls = Calls(dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    def called(name: str) -> None:
        calls.all[name] += 1

    hooks = []
    for module, layer in patched:
        hooks.append(module.register_forward_hook(lambda _m, _a, _o, name=layer.name: called(name)))
        layer.__dict__["attend"] = _counting(layer.name, layer.attend, calls)  # hides the class's own
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for _, layer in patched:
            del layer.__dict__["attend"]


def _counting(name: str, attend: Callable[..., Tensor], calls: Calls) -> Callable[..., Tensor]:
    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.absorbed[name] += 1
        return attend(*args, **kwargs)

    return counting
