"""Absorbed weights from disk for a model in memory: do they belong to it?

Where a projection is still in the dtype its source had, its hash must be the source's: one changed
bit is refused. Where it was dequantized or cast on the way, stored and present weights may differ by
the roundings involved, and by nothing more (:mod:`mla_convert.belonging`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import transformers
from torch import Tensor

from mla_convert.architectures import projection_of
from mla_convert.belonging import compare_factored, compare_fused_ov, compare_fused_qk
from mla_convert.coded_belonging import compare_coded
from mla_convert.comparison import Comparison
from mla_convert.digest import tensor_digest
from mla_convert.errors import MismatchError, SidecarError, UsageError
from mla_convert.formats import plain
from mla_convert.forms import Forms
from mla_convert.manifest import SourceTensor, StoredLayer
from mla_convert.patches.adapters import adds
from mla_convert.patches.modules import module_geometry, query_name
from mla_convert.patches.sources import effective_weight
from mla_convert.patches.weights import Stored
from mla_convert.quantization import Quantized
from mla_convert.recipe import SIDE_NAMES
from mla_convert.storage import AbsorbedCheckpoint
from mla_convert.wording import option


@dataclasses.dataclass(frozen=True)
class Asked:
    """The form that a call asks for on each side: "factored", "fused" or "auto"."""

    qk: str
    vo: str


class Sidecar:
    """An :class:`AbsorbedCheckpoint` being given to the attention modules of one model."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.store = AbsorbedCheckpoint.open(folder)
        self.label = os.fspath(folder)

    @property
    def coded(self) -> bool:
        """Whether any of its weights is quantized."""
        return self.store.manifest.quantization is not None

    def stored(self, name: str, module: Any, asked: Asked) -> Stored:
        """The absorbed weights of ``module``, after checking that they belong to it.

        Raises:
            MismatchError: naming layer, tensor and how far off it is.
            UsageError: a form was asked for that the sidecar does not hold.
        """
        index = int(module.layer_idx)
        if index not in self.store.layers:
            raise MismatchError(f"{self.label} has no layer {index}, which {name} is: it was made from another model")
        layer = self.store.layers[index]
        for side in ("qk", "vo"):
            wanted, found = getattr(asked, side), getattr(layer, side)
            if wanted not in ("auto", found):
                raise UsageError(
                    f"the {SIDE_NAMES[side]} was asked for as {wanted}, and {self.label} holds it {found}: "
                    f"leave {option('form')} out, or convert again"
                )
        self.store.check_geometry(index, module_geometry(module))
        tensors = self.store.layer_tensors(index)
        qk, vo = tensors.get("k_b", tensors.get("qk")), tensors.get("v_b", tensors.get("ov"))
        assert qk is not None and vo is not None
        self._check(index, layer, module, tensors)
        return Stored(Forms(layer.qk, layer.vo), qk, vo)

    def _check(self, index: int, layer: StoredLayer, module: Any, tensors: dict[str, Tensor | Quantized]) -> None:
        cast: list[SourceTensor] = []
        for source in self._sources(index, layer):
            part = _part_of(module, source)
            if adds(getattr(module, part)):
                raise MismatchError(
                    f"layer {index}: {part} of the model has active adapters, and {self.label} was made without them: "
                    "merge them, save the model and convert it, or patch without a folder"
                )
            weight = effective_weight(part, getattr(module, part))
            if source.quantized or plain(weight.dtype) != source.dtype:
                cast.append(source)
            elif tensor_digest(weight.cpu()) != source.sha256:
                error = self._worst(layer, module, tensors, None).error
                raise MismatchError(
                    f"layer {index}: {source.name} of the model is not what {self.label} was made from (same dtype, "
                    f"other bits; relative error {error:.1e}): use the weights made from this model, or convert again"
                )
        # Also where all hashes agree: what is stored may have been damaged since.
        found = self._worst(layer, module, tensors, cast[0] if cast else None)
        if found.fits:
            return
        if cast:
            raise MismatchError(self._too_far(index, cast, found))
        raise SidecarError(
            f"layer {index}: the absorbed weights in {self.label} do not follow from the weights they were made from "
            f"({found.where}, relative error {found.error:.1e}): the file is damaged, convert again"
        )

    def _sources(self, index: int, layer: StoredLayer) -> list[SourceTensor]:
        """What the layer was made from; the manifest must name each of the weights that its forms need."""
        parts = {"kv_b_proj"} | ({"o_proj"} if layer.vo == "fused" else set())
        named = {projection_of(name) for name in layer.sources}
        missing = [name for name in layer.sources if name not in self.store.manifest.source.tensors]
        if missing or not parts <= named or (layer.qk == "fused" and "query" not in named):
            raise SidecarError(
                f"layer {index}: the manifest in {self.label} does not say what the weights were made from "
                f"({', '.join(missing) or 'source tensors are missing'}): it was edited, convert again"
            )
        return [self.store.manifest.source.tensors[name] for name in layer.sources]

    def _worst(
        self, layer: StoredLayer, module: Any, tensors: dict[str, Tensor | Quantized], cast: SourceTensor | None
    ) -> Comparison:
        g = layer.geometry
        # Only what was dequantized has been rounded to the source's dtype between the source and the model.
        dtype = cast.source_dtype if cast is not None and cast.quantized else None
        found = self._coded(layer, module, tensors, cast)
        uncoded = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
        exact = all(layer.tensors[key].largest_error == 0 for key in ("k_b", "v_b") if key in uncoded)
        kv_b = effective_weight("kv_b_proj", module.kv_b_proj)
        if "k_b" in uncoded or "v_b" in uncoded:
            rows = uncoded.get("k_b"), uncoded.get("v_b")
            found.append(compare_factored(*rows, kv_b, g, source_dtype=dtype, stored_exactly=exact))
        if "qk" in uncoded:
            name = query_name(module)
            query = effective_weight(name, getattr(module, name))
            found.append(compare_fused_qk(uncoded["qk"], kv_b, query, g, source_dtype=dtype))
        if "ov" in uncoded:
            o = effective_weight("o_proj", module.o_proj)
            found.append(compare_fused_ov(uncoded["ov"], kv_b, o, g, source_dtype=dtype))
        return max(found, key=lambda comparison: comparison.excess)

    @staticmethod
    def _coded(
        layer: StoredLayer, module: Any, tensors: dict[str, Tensor | Quantized], cast: SourceTensor | None
    ) -> list[Comparison]:
        kv_b = effective_weight("kv_b_proj", module.kv_b_proj)
        casts = [] if cast is None else [kv_b.dtype]
        if cast is not None and cast.quantized:
            casts.append(cast.source_dtype)
        others = {"qk": query_name(module), "ov": "o_proj"}
        found = []
        for key, tensor in tensors.items():
            if isinstance(tensor, Quantized):
                other = effective_weight(others[key], getattr(module, others[key])) if key in others else None
                found.append(compare_coded(key, tensor, layer.tensors[key], (kv_b, other), layer.geometry, casts))
        return found

    def _too_far(self, index: int, cast: list[SourceTensor], found: Comparison) -> str:
        names = ", ".join(source.name for source in cast)
        message = (
            f"layer {index}: {self.label} and the model's {names} differ by a relative error of {found.error:.1e} "
            f"({found.where}); rounding explains {found.bound:.1e} at most"
        )
        otherwise = "Use"
        if any(source.in_fp8_blocks for source in cast):
            otherwise = "Otherwise use"
            message += (
                f". The source is in FP8 blocks, and transformers {transformers.__version__} misreads those on a CPU "
                "where a weight's rows or columns are not whole blocks: load it with mla_convert.load(folder), which "
                "dequantizes by the config's block size"
            )
        elif forms := sorted({source.form for source in cast if source.form is not None}):
            otherwise = "Otherwise use"
            message += (
                f". The source is stored in codes ({'; '.join(forms)}): load it with mla_convert.load(folder), which "
                "dequantizes it as convert did"
            )
        return f"{message}. {otherwise} the weights made from this model, or convert again where the file is damaged"


def check_kept(codes: str, sidecar: Sidecar | None) -> None:
    """UsageError where ``patch(codes="keep")`` has no codes to keep."""
    if codes == "keep" and (sidecar is None or not sidecar.coded):
        found = "no folder of absorbed weights was given" if sidecar is None else f"{sidecar.label} holds plain numbers"
        raise UsageError(
            f"{option('codes', codes)} keeps the codes of a quantized folder, and {found}: write one with convert and "
            f"{option('quantize')}, or leave {option('codes')} out"
        )


def _part_of(module: Any, source: SourceTensor) -> str:
    """The submodule whose weight a source tensor is, whatever the checkpoint calls it."""
    projection = projection_of(source.name)
    return query_name(module) if projection == "query" else projection
