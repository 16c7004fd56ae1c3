"""What is verified: a model in memory or a checkpoint folder, with its absorbed weights, and in other precisions."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import FOLDER
from mla_convert.divergence import largest
from mla_convert.errors import UsageError
from mla_convert.formats import plain
from mla_convert.hub_snapshots import local_folder
from mla_convert.judgement import StageReport
from mla_convert.manifest import Manifest
from mla_convert.patches.loading import load_original
from mla_convert.patches.modules import weight_dtype
from mla_convert.patches.plain_copy import check_numbers, code_labels, plain_copy
from mla_convert.patches.recognition import attention_modules
from mla_convert.paths import source_of
from mla_convert.quiet import no_loading_bars
from mla_convert.schemes import Scheme
from mla_convert.storage import AbsorbedCheckpoint, own_sidecar
from mla_convert.wording import option

_SIDE_KEYS = (("k_b", "qk"), ("v_b", "ov"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Subject:
    """What is verified, and the same model in other dtypes."""

    def __init__(
        self,
        given: PreTrainedModel | str | os.PathLike[str],
        absorbed: str | os.PathLike[str] | None,
        dtype: str | torch.dtype | None,
    ) -> None:
        self.absorbed = absorbed
        self.manifest: Manifest | None = None
        self.source: str | None = None
        self.folder: str | None = None
        self.codes: tuple[str, ...] = ()
        if isinstance(given, PreTrainedModel):
            self._take_model(given, dtype)
        elif isinstance(given, str | os.PathLike):
            self._open(given, dtype)
        else:
            raise UsageError(f"verify takes a transformers model or a checkpoint folder, found {type(given).__name__}")
        if self.absorbed is not None and self.manifest is None:
            self.manifest = AbsorbedCheckpoint.open(self.absorbed).manifest
        self._refuse_codes_twice()

    def _take_model(self, model: PreTrainedModel, dtype: str | torch.dtype | None) -> None:
        attention: Any = attention_modules(model)[0][1]
        self.model, self.dtype = model, weight_dtype(attention)
        self.codes = code_labels(model)
        if dtype is not None and parse_dtype(dtype) != self.dtype:
            wanted = plain(parse_dtype(dtype))
            raise UsageError(
                f"{option('dtype', wanted)} was asked for, and the model is in {plain(self.dtype)}: leave it out"
            )
        if self.codes or self.dtype != torch.float32:
            check_numbers(model)
        place = str(getattr(model, "name_or_path", "") or "")
        self.folder = place if place and pathlib.Path(place).is_dir() else None
        self.label = place or type(model).__name__

    def _refuse_codes_twice(self) -> None:
        if self.codes and self.absorbed is not None and self.schemes is not None:
            raise UsageError(
                f"the model holds codes already ({', '.join(self.codes)}), and the absorbed weights in "
                f"{os.fspath(self.absorbed)} others: verify the folder of the model instead, which is loaded in plain "
                "numbers"
            )

    def _open(self, source: str | os.PathLike[str], dtype: str | torch.dtype | None) -> None:
        source = local_folder(source_of(source))
        checkpoint = Checkpoint.open(source)
        own = checkpoint.config.get("dtype", "float32")
        self.dtype = torch.float32 if dtype is None else parse_dtype(own if dtype == "source" else dtype)
        if self.absorbed is None:
            self.absorbed = own_sidecar(source)
        if self.absorbed is not None:
            store = AbsorbedCheckpoint.open(self.absorbed)
            store.check_source(checkpoint)
            self.manifest = store.manifest
        self.source = self.folder = self.label = os.fspath(source)
        self.model = self._load(self.dtype)

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The source in ``dtype``; FP8 blocks are rounded once to what the absorbed weights were stored in."""
        assert self.source is not None
        stored = None if self.manifest is None else getattr(torch, self.manifest.dtype, None)
        with no_loading_bars():
            return load_original(self.source, dtype=dtype, stored_dtype=stored)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def at(self, dtype: torch.dtype) -> PreTrainedModel:
        """The original in ``dtype``: the model itself where it is in that, else another."""
        if dtype == self.dtype:
            return self.model
        return plain_copy(self.model, dtype) if self.source is None else self._load(dtype)

    def reference(self) -> PreTrainedModel:
        """The float32 original that all is measured from; where the model holds codes, in the numbers they mean."""
        return plain_copy(self.model, torch.float32) if self.codes else self.at(torch.float32)

    @property
    def schemes(self) -> tuple[Scheme | None, Scheme | None] | None:
        """How the key side and the value side of the absorbed weights are coded; None where neither is."""
        tensors = {} if self.manifest is None else dict(self.manifest.layers[0].tensors)
        found = [next((tensors[key].scheme for key in keys if key in tensors), None) for keys in _SIDE_KEYS]
        return (found[0], found[1]) if any(found) else None

    @property
    def whose(self) -> str:
        """What the floor is, in a word."""
        return "the original's own" if self.schemes is None else "that of the same bits on kv_b_proj"

    def floor_dtype(self) -> torch.dtype | None:
        """The lowest precision that anything here was rounded to; None where that is float32 or better.

        float32 where that is so, but codes are between the original and the float32 reference: some round their inputs,
        too.
        """
        dtypes = [self.dtype, *self._rounded_to()]
        lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        if torch.finfo(lowest).eps > torch.finfo(torch.float32).eps:
            return lowest
        return torch.float32 if self.codes or self.schemes is not None else None

    def _rounded_to(self) -> Iterator[torch.dtype]:
        """Dtypes of stored weights that are not the source's own numbers.

        Slices of a quantized source are no matter: the original is rounded to the same numbers.
        """
        for layer in () if self.manifest is None else self.manifest.layers:
            assert self.manifest is not None
            quantized = any(self.manifest.source.tensors[name].quantized for name in layer.sources)
            for key, tensor in layer.tensors.items():
                sliced = key in ("k_b", "v_b") and (quantized or not tensor.largest_error)
                if not sliced and tensor.scheme is None:
                    yield tensor.dtype

    def notes(self, reports: Sequence[StageReport]) -> Iterator[str]:
        """What the figures do not say by themselves."""
        if self.codes:
            yield (
                f"the model holds codes ({', '.join(self.codes)}): the float32 original has what they mean as plain "
                "weights, and the floor is the model as it runs by itself"
            )
        rounded = {plain(dtype) for dtype in self._rounded_to() if torch.finfo(dtype).bits < 32}
        if rounded:
            patched = largest(stage.patched.largest_relative_settled for stage in reports)
            own = largest(stage.floor.largest_relative_settled for stage in reports if stage.floor is not None)
            yield (
                f"absorbed weights were rounded to {', '.join(sorted(rounded))}: logits move by up to {patched:.1e} of "
                f"their range, and by up to {own:.1e} in the original at that precision (positions where routers "
                "keep to their experts)"
            )
        if self.source is not None and self.absorbed == self.source:
            yield f"the absorbed weights are those in {pathlib.Path(self.source) / FOLDER}"
        quantized = self.manifest is not None and any(t.quantized for t in self.manifest.source.tensors.values())
        if quantized and self.source is None and not all(stage.passed for stage in reports):
            yield (
                "the source of these absorbed weights is quantized, and the model may have been dequantized to another "
                "dtype than they were: verify the folder itself, which rounds both alike"
            )


def parse_dtype(given: str | torch.dtype) -> torch.dtype:
    """The dtype of that name; UsageError for one that is not compared."""
    name = plain(given) if isinstance(given, torch.dtype) else given
    if name not in DTYPES:
        raise UsageError(f"{option('dtype', name)}; supported are {', '.join(DTYPES)}, and source for a folder")
    return DTYPES[name]
