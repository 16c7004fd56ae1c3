"""Older transformers: what they lack, and another name for the cache.

Those before 5.24 call a model's cache ``past_key_values``; the tests say ``cache``, as later releases do.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
RENAMED = (5, 24)


def lacks(what: str) -> pytest.MarkDecorator:
    """Leaves a test out under the older releases, which lack ``what``."""
    return pytest.mark.skipif(RELEASE < RENAMED, reason=f"transformers {transformers.__version__} lacks {what}")


def accept_cache() -> None:
    """Let models and ``generate`` of older releases take ``cache``. The package itself knows both names."""
    if RELEASE >= RENAMED:
        return

    def call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **_renamed(self, kwargs))

    generate = GenerationMixin.generate

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **_renamed(self, kwargs))

    PreTrainedModel.__call__ = call  # type: ignore[method-assign]
    GenerationMixin.generate = generating  # type: ignore[method-assign]
    transformers.utils.ModelOutput.cache = property(lambda output: output.past_key_values)


def _renamed(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if "cache" in kwargs and "cache" not in inspect.signature(model.forward).parameters:
        kwargs["past_key_values"] = kwargs.pop("cache")
    return kwargs
