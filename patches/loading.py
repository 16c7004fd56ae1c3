"""Loading models: from any layout that the package reads, in the numbers that the checkpoint means."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from mla_convert.checkpoint import Checkpoint
from mla_convert.config_styles import without_quantization
from mla_convert.errors import CheckpointError
from mla_convert.hub_snapshots import local_folder
from mla_convert.patches.apply import patch
from mla_convert.paths import source_of
from mla_convert.storage import own_sidecar


def load_original(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    stored_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """The unpatched transformers model of a checkpoint folder, in evaluation mode; a hub id stands for its snapshot.

    Plain Hugging Face folders go through ``from_pretrained``. Quantized weights and DeepSeek's native parts are read
    by this package: transformers misreads partial FP8 blocks on a CPU, keeps other codes packed, and does not know the
    parts.

    Args:
        dtype: of the model; by default the config's own.
        stored_dtype: what quantized weights are rounded to once, before the cast to ``dtype``; by default the config's
            own.
        kwargs: handed to ``from_pretrained``.
    """
    source = local_folder(source_of(source))
    checkpoint = Checkpoint.open(source)
    with _loading(source):
        config = _config_for(checkpoint)
        kind: Any = class_for(config)
    if checkpoint.layout != "native" and checkpoint.quantization is None:
        with _loading(source):
            return _ready(kind.from_pretrained(os.fspath(source), config=config, dtype=dtype or "auto", **kwargs))
    checkpoint.refuse_unreadable()
    state = {
        name: checkpoint.weight(name, stored_dtype if checkpoint.quantized(name) else None)
        for name in checkpoint.weight_names()
    }
    plain_dtype = dtype or getattr(torch, checkpoint.config.get("dtype", "float32"))
    with _loading(source):
        return _ready(kind.from_pretrained(None, config=config, state_dict=state, dtype=plain_dtype, **kwargs))


def _config_for(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' config of a checkpoint, for plain weights; it reads every style of its own by itself."""
    raw = checkpoint.raw_config if "model_type" in checkpoint.raw_config else checkpoint.config
    values = without_quantization(raw)
    kind = values["model_type"] if values["model_type"] in CONFIG_MAPPING else checkpoint.family.model_type
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"transformers {transformers.__version__} has no {kind} models; install a version that has them"
        )
    del values["model_type"]
    values.pop("auto_map", None)
    return CONFIG_MAPPING[kind](**values)


def class_for(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that the checkpoint was written from, or the one that transformers has for its config.

    Raises:
        CheckpointError: where it has none that generates.
    """
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config):
            return found
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]  # type: ignore[no-any-return]
    raise CheckpointError(f"transformers {transformers.__version__} has no generating model for {config.model_type}")


@contextlib.contextmanager
def _loading(source: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever transformers makes of a config or of weights that it cannot use, as one error of ours."""
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())[:500]
        raise CheckpointError(
            f"transformers cannot build the model in {os.fspath(source)} from its config.json ({type(error).__name__}: "
            f"{reason}); take the config that belongs to the checkpoint"
        ) from error


def _ready(model: Any) -> PreTrainedModel:
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def load(
    folder: str | os.PathLike[str],
    absorbed: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    patching: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a checkpoint folder of any supported layout and patch it: ``from_pretrained`` and ``patch`` in one.

    Args:
        folder: the checkpoint.
        absorbed: a folder that ``convert`` wrote; by default the ``mla_absorbed`` inside ``folder``, if there is one,
            else the absorbed weights are derived from the model.
        dtype: of the model; by default the config's own.
        patching: keyword arguments of ``patch``.
        kwargs: handed to ``from_pretrained`` (``device_map``, ``attn_implementation``, …).
    """
    if absorbed is None:
        absorbed = own_sidecar(folder)
    model = load_original(folder, dtype=dtype, **kwargs)
    patch(model, absorbed, **(patching or {}))
    return model
