"""What a patched model says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mla_convert.patches.forms import PLAIN
from mla_convert.patches.layer import AbsorbedLayer


@dataclasses.dataclass(frozen=True)
class PatchDescription:
    """What runs in a patched model; ``str()`` of it is for people, ``to_dict()`` for programs."""

    family: str
    qk_form: str
    vo_form: str
    weights_from: str
    products: tuple[str, ...]
    backend: str
    prefill_threshold: int | str
    cache: str
    original_attention: str
    layers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dataclasses.asdict(self) | {"layers": list(self.layers), "products": list(self.products)}

    def __str__(self) -> str:
        threshold = self.prefill_threshold
        rule = "by cost" if threshold == "auto" else f"up to {threshold} new tokens"
        first, last = self.layers[0], self.layers[-1]
        quantized = "".join(f"  {product}\n" for product in self.products)
        known = "" if self.family != "unknown" else "\n  not a known family: whether it is the same model, verify tells"
        return (
            f"{self.family}: {len(self.layers)} attention modules patched ({first} … {last}){known}\n"
            f"  key side {self.qk_form}, value side {self.vo_form}, weights from {self.weights_from}\n"
            f"{quantized}"
            f"  absorbed {rule}, backend {self.backend}; else expanded through {self.original_attention}\n"
            f"  cache: {self.cache}"
        )


def products_of(layers: Sequence[AbsorbedLayer]) -> tuple[str, ...]:
    """How the weights of a quantized sidecar are used, for each side that is quantized; usually all layers agree."""
    names = {"qk": "key side", "vo": "value side"}
    said = [f"{names[side]}: {words}" for layer in layers for side, words in sorted(layer.products.items())]
    return tuple(dict.fromkeys(said))


def read_through(layers: Sequence[AbsorbedLayer]) -> str:
    """Where the weights of a model without a sidecar come from."""
    forms = sorted({source.form for layer in layers for source in layer.sources} - {PLAIN.label})
    return "the model itself" + (f", through {', '.join(forms)}" if forms else "")
