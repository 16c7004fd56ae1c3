"""The README.md that goes with absorbed weights: what they are, how they were made, how to use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mla_convert.forms import SideReads
from mla_convert.manifest import Manifest, StoredLayer
from mla_convert.origin import Origin
from mla_convert.version import __version__

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

_LAYOUT = """---
{front}library_name: transformers
tags:
- mla
- mla-convert
---

# {title} in {layout}

The values of the original{of}, unchanged: every number, codes and scales alike, has the bits that it had. They are in
{layout}, {count}.{notes}{source_card}

{use}
Written by mla_convert {version}.
"""

_HF, _NATIVE = "Hugging Face's layout", "DeepSeek's native layout"

_USE_HF = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("OUT", dtype="auto")  # OUT: this folder
```

`mla_convert.load("OUT")` loads it as well, and lets it decode in latent space.
"""

_USE_NATIVE = """\
DeepSeek's own inference code loads it with one process for each part ({parts}), this folder as its `--ckpt-path`, and
the `config.json` here as its `--config`. `mla_convert.load("OUT")` loads it into transformers, decoding in latent
space.
"""

_RECIPE = """## What is stored

{layers} layers, stored in {dtype}, {coded}. "Numbers read" are the weights of one side that one decode step
reads, over all layers, in thousands of numbers.

| side | form | numbers read, factored | numbers read, fused | largest rounding error | in the Frobenius norm |
|---|---|---|---|---|---|
{rows}

Factored: exact row slices of `kv_b_proj` (`k_b_proj`, `v_b_proj`), cast where another dtype was asked for. Fused:
products of the two projections of a side (`qk_absorbed`, `ov_absorbed`), formed in float32 or wider and rounded once.
Rounding errors are relative, the largest over all layers; of large fused weights, over a thirty-second of their rows.

## How they were made

mla_convert {version}, from a checkpoint in the {layout} layout{quantized}. `mla_manifest.json` has the geometry and
the error figures of every layer, and the SHA-256 of every source tensor used; loading compares them, so that weights
made from another checkpoint are refused.
"""


def model_card(manifest: Manifest, origin: Origin) -> str:
    """The card of absorbed weights made from a model of this origin."""
    return _fill(_CARD, manifest, origin)


def standalone_card(manifest: Manifest, origin: Origin) -> str:
    """The card of a whole model with absorbed weights inside."""
    return _fill(_STANDALONE, manifest, origin)


def layout_card(target: str, files: Sequence[str], model_type: str, origin: Origin, notes: Sequence[str]) -> str:
    """The card of the same values in another layout, ``hf`` or ``native``; ``notes`` say what is not as it was."""
    layout, use = (_HF, _USE_HF) if target == "hf" else (_NATIVE, _USE_NATIVE)
    return _LAYOUT.format(
        **_named(origin, model_type),
        layout=layout,
        count=f"{len(files)} file{'s' if len(files) > 1 else ''}",
        notes="".join(f" {note[0].upper()}{note[1:]}." for note in notes),
        use=use.format(parts=len(files)),
        version=__version__,
    )


def _named(origin: Origin, model_type: str) -> dict[str, str]:
    return {
        "front": origin.front(),
        "of": f" of {origin.base}" if origin.base else "",
        "title": origin.base or f"A model of type {model_type}",
        "source_card": " The original's own card is `README.source.md`." if origin.has_card else "",
    }


def _fill(card: str, manifest: Manifest, origin: Origin) -> str:
    forms = dict.fromkeys(tensor.form for tensor in manifest.source.tensors.values() if tensor.form is not None)
    return (card + _RECIPE).format(
        **_named(origin, manifest.source.model_type),
        original=origin.base or "SOURCE",
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
