"""The README.md that goes with absorbed weights: what they are, how they were made, how to use them."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError  # type: ignore[import-untyped]  # what the hub's reader of cards raises

from mla_convert.absorption import SideReads
from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import CARD
from mla_convert.hub import HubPath
from mla_convert.manifest import Manifest, StoredLayer

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")

_CARD = """---
{front}library_name: transformers
tags:
- mla
- mla-convert
---

# Absorbed attention weights{of}

Precomputed weights with which a model of type `{model_type}` decodes in latent space: its multi-head latent attention
reads the cached latents as they are, instead of expanding the whole history at every step. They come beside the
original checkpoint and do not replace it.

```python
import mla_convert
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{original}")
mla_convert.patch(model, "OUT")  # OUT: this folder
```

"""

_STANDALONE = """---
{front}library_name: transformers
tags:
- mla
- mla-convert
---

# {title} with absorbed attention weights

A whole checkpoint, with the values of the original{of}, which `from_pretrained` loads as it is; the subfolder
`mla_absorbed` holds precomputed weights with which the model decodes in latent space: its multi-head latent attention
reads the cached latents as they are, instead of expanding the whole history at every step.

```python
import mla_convert

model = mla_convert.load("OUT")  # OUT: this folder
```

or, where the model is loaded already, `mla_convert.patch(model, "OUT")`.{source_card}

"""

_RECIPE = """## What is stored

{layers} layers, stored in {dtype}, {coded}. "Numbers read" are the weights of one side that one decode step
reads, over all layers, in thousands of numbers.

| side | form | numbers read, factored | numbers read, fused | largest rounding error | in the Frobenius norm |
|---|---|---|---|---|---|
{rows}

Factored: exact row slices of `kv_b_proj` (`k_b_proj`, `v_b_proj`), cast where another dtype was asked for. Fused:
products of the two projections of a side (`qk_absorbed`, `ov_absorbed`), formed in float32 or wider and rounded once.
Rounding errors are relative, the largest over all layers.

## How they were made

mla_convert {version}, from a checkpoint in the {layout} layout{quantized}. `mla_manifest.json` has the geometry and
the error figures of every layer, and the SHA-256 of every source tensor used; loading compares them, so that weights
made from another checkpoint are refused.
"""


def model_card(manifest: Manifest, checkpoint: Checkpoint) -> str:
    """The card of absorbed weights made from ``checkpoint``."""
    return _fill(_CARD, manifest, checkpoint)


def standalone_card(manifest: Manifest, checkpoint: Checkpoint) -> str:
    """The card of a whole model with absorbed weights inside."""
    return _fill(_STANDALONE, manifest, checkpoint)


def _fill(card: str, manifest: Manifest, checkpoint: Checkpoint) -> str:
    base = checkpoint.path.repo_id if isinstance(checkpoint.path, HubPath) else _base_model(checkpoint.raw_config)
    forms = dict.fromkeys(tensor.form for tensor in manifest.source.tensors.values() if tensor.form is not None)
    return (card + _RECIPE).format(
        front=_front(base, checkpoint.path),
        of=f" of {base}" if base else "",
        title=base or f"A model of type {manifest.source.model_type}",
        source_card=" The original's own card is `README.source.md`." if (checkpoint.path / CARD).is_file() else "",
        original=base or "SOURCE",
        model_type=manifest.source.model_type,
        layers=len(manifest.layers),
        dtype=manifest.dtype if manifest.dtype != "mixed" else "the dtypes that the manifest lists",
        coded=_coded(manifest),
        rows="\n".join(_rows(manifest.layers)),
        version=manifest.tool_version,
        layout=manifest.source.layout,
        quantized=f" with weights in codes ({'; '.join(forms)}), dequantized in float32" if forms else "",
    )


def _coded(manifest: Manifest) -> str:
    """Which modules are quantized and how."""
    coded = {
        (tensor.name.split(".")[-2], str(tensor.scheme)): None
        for tensor in manifest.tensors.values()
        if tensor.scheme is not None
    }
    if not coded:
        return "not quantized"
    which = ", ".join(f"`{module}` {scheme}" for module, scheme in coded)
    return f"quantized with the names and the packing of compressed-tensors: {which}"


def _front(base: str | None, source: pathlib.Path) -> str:
    """The first lines of the card: the model it goes with, and the licence that the source's own card names."""
    lines = {"base_model": base} | _licence(source / CARD)
    return "".join(f"{key}: {_scalar(value)}\n" for key, value in lines.items() if value)


def _scalar(value: str) -> str:
    """A text in YAML: bare where it cannot mean anything else."""
    return value if re.fullmatch(r"[A-Za-z][\w./-]*", value) else json.dumps(value)


def _licence(card: pathlib.Path) -> dict[str, str | None]:
    try:
        data: Any = ModelCard(card.read_text("utf-8"), ignore_metadata_errors=True).data
    except (OSError, ValueError, YAMLError):
        return {}
    keys = ("license", "license_name", "license_link")
    return {key: data.get(key) for key in keys if isinstance(data.get(key), str)}


def _base_model(raw_config: Mapping[str, Any]) -> str | None:
    """The hub id that the config says it was loaded from; a path on somebody's machine is not one."""
    name = raw_config.get("_name_or_path")
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


def _rows(layers: tuple[StoredLayer, ...]) -> Iterable[str]:
    key = [(layer.qk, layer.reads.qk, layer.tensors.get("k_b") or layer.tensors["qk"]) for layer in layers]
    value = [(layer.vo, layer.reads.vo, layer.tensors.get("v_b") or layer.tensors["ov"]) for layer in layers]
    for side, entries in (("key", key), ("value", value)):
        forms = sorted({form for form, _, _ in entries})
        largest = max(tensor.largest_error for _, _, tensor in entries)
        frobenius = max(tensor.frobenius_error for _, _, tensor in entries)
        yield (
            f"| {side} | {' and '.join(forms)} | {_figures(figures for _, figures, _ in entries)} "
            f"| {_error(largest)} | {_error(frobenius)} |"
        )


def _figures(figures: Iterable[SideReads]) -> str:
    listed = list(figures)
    factored, fused = sum(each.factored for each in listed), sum(each.fused for each in listed)
    return f"{factored / 1e3:,.1f} | {fused / 1e3:,.1f}"


def _error(value: float) -> str:
    return f"{value:.2e}" if value else "0 (exact)"
