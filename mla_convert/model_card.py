"""The README.md that goes with absorbed weights: what they are, how they were made, how to use them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mla_convert.absorption import SideReads
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

## What is stored

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


def model_card(manifest: Manifest, raw_config: Mapping[str, Any]) -> str:
    """The card's text; ``raw_config`` is the source's config, which may name the model on the hub."""
    base = _base_model(raw_config)
    forms = dict.fromkeys(tensor.form for tensor in manifest.source.tensors.values() if tensor.form is not None)
    return _CARD.format(
        front=f"base_model: {base}\n" if base else "",
        of=f" of {base}" if base else "",
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
