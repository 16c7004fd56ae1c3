"""Find the weights of a checkpoint that are stored in codes.

:func:`find_quantized` goes through a checkpoint's headers, module by module, and puts the tensors of each quantized
weight together under its name, ``module.weight``, as the rows of :mod:`mla_convert.code_formats` have them. What is
missing, left over, or of the wrong shape or dtype is refused by name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping

from mla_convert.code_formats import FORMATS, Format, Part, Shape, asymmetric
from mla_convert.errors import FormatError
from mla_convert.folders import Stored
from mla_convert.formats import CODES, FP8, PLAIN_DTYPES, plain, wrong_shape
from mla_convert.shards import read_metadata
from mla_convert.source_schemes import Quantization, SourceScheme

# Scales of activations and of the cache, and what else may stand beside a weight and does not change it.
_BESIDE = re.compile(
    r"bias|(input|output|[kqv]|kv|attn|prob|prob_output|activation)_(scale|zero_point|global_scale|scale_ub)"
    r"|input_scale_ub|(k|v)_proj\.(k|v|output)_scale"
)
_PARTS = tuple({suffix for form in FORMATS.values() for part in form.parts for suffix in part.suffixes})
_PACKED = {form.codes for form in FORMATS.values()} - {"weight"}
_MODULE = re.compile(r"(.*?)\.?(weight\..+|[^.]+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight stored in codes: its name and shape, and the stored tensors by the last words of their names."""

    name: str
    shape: Shape
    scheme: SourceScheme
    tensors: Mapping[str, Stored]

    @property
    def format(self) -> Format:
        """Its row of :data:`FORMATS`."""
        return FORMATS[self.scheme.format]

    @property
    def codes(self) -> Stored:
        """The tensor with the codes."""
        return self.tensors[self.format.codes]

    @property
    def companions(self) -> dict[str, Stored]:
        """What goes with the codes, by suffix, sorted."""
        return {suffix: self.tensors[suffix] for suffix in sorted(self.tensors) if suffix != self.format.codes}


def split_name(name: str) -> tuple[str, str]:
    """The module of a stored tensor and what it is there: ``a.b.weight`` and ``a.b.weight.absmax`` are of ``a.b``.

    A name that ends in a dot, or has no letter, is nothing of any module.
    """
    match = _MODULE.fullmatch(name)
    return (name, "") if match is None else (match[1], match[2])


def find_quantized(
    tensors: Mapping[str, Stored], quantization: Quantization | None, shapes: Mapping[str, Shape]
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Every weight that is stored in codes, and the names of all tensors that are no weights of their own.

    ``shapes`` are those that are expected, for formats whose headers leave a weight's shape open. Of a quantization
    that cannot be read nothing is found, and nothing refused.
    """
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        module, suffix = split_name(name)
        modules.setdefault(module, {})[suffix] = tensor
    found: dict[str, QuantizedWeight] = {}
    beside: set[str] = set()
    if quantization is not None and quantization.unreadable:
        return found, beside
    for module, stored in modules.items():
        if not any(_suspicious(suffix, tensor, quantization) for suffix, tensor in stored.items()):
            continue
        weight = _of_module(module, stored, quantization, shapes.get(f"{module}.weight"))
        if weight is not None:
            found[weight.name] = weight
            beside |= {tensor.name for suffix, tensor in weight.tensors.items() if suffix != "weight"}
        beside |= {tensor.name for suffix, tensor in stored.items() if suffix != "bias" and _BESIDE.fullmatch(suffix)}
    return found, beside


def _suspicious(suffix: str, tensor: Stored, quantization: Quantization | None) -> bool:
    """Whether a tensor says that its module may be stored in codes."""
    if suffix == "weight":
        return tensor.dtype not in PLAIN_DTYPES
    if quantization is None:
        return suffix in ("weight_scale_inv", "weight_scale")
    return suffix in _PACKED or _is_part(suffix) or (suffix != "bias" and bool(_BESIDE.fullmatch(suffix)))


def _is_part(suffix: str, parts: Iterable[str] = _PARTS) -> bool:
    return any(fnmatch.fnmatchcase(suffix, part) for part in parts)


def _of_module(
    module: str, stored: Mapping[str, Stored], quantization: Quantization | None, expected: Shape | None
) -> QuantizedWeight | None:
    scheme = quantization.scheme(module) if quantization is not None else None
    form = FORMATS[scheme.format] if scheme is not None else None
    if scheme is None or form is None or not _holds_codes(stored, form):
        _refuse_leftovers(stored, quantization, scheme)
        return None
    assert quantization is not None
    codes = stored[form.codes]
    if quantization.ignores(module):
        raise FormatError(
            f"{codes.name} is stored in codes ({plain(codes.dtype)}), and the config's quantization_config lists "
            f"{module} among the modules that are not quantized; take the config.json that belongs to the checkpoint"
        )
    if quantization.rotates(module):
        raise FormatError(
            f"{module} is among the modules whose activations the config's transform_config rotates when the model "
            "runs, so that its weights alone are not the model's; take a checkpoint without such transforms"
        )
    parts = _parts(module, stored, form, scheme)
    if len(codes.shape) != 2:
        raise FormatError(
            f"{codes.name} holds codes in shape {list(codes.shape)}; supported are weights of two dimensions"
        )
    shape = form.shape(codes.shape, scheme, expected)
    _refuse_surplus(module, stored, form, parts)
    weight = QuantizedWeight(f"{module}.weight", shape, scheme, {form.codes: codes} | parts)
    _check_joints(weight)
    for part in form.parts:
        _check_part(weight, part)
    return weight


def _holds_codes(stored: Mapping[str, Stored], form: Format) -> bool:
    codes = stored.get(form.codes)
    return codes is not None and (not form.dtypes or codes.dtype in form.dtypes)


def _parts(module: str, stored: Mapping[str, Stored], form: Format, scheme: SourceScheme) -> dict[str, Stored]:
    parts: dict[str, Stored] = {}
    for part in form.parts:
        found = [suffix for suffix in stored if suffix != form.codes and _is_part(suffix, part.suffixes)]
        if not found and part.needed(scheme):
            raise FormatError(
                f"{stored[form.codes].name} is stored in {plain(stored[form.codes].dtype)}, but its "
                f"{'scale' if 'scale' in part.suffixes[0] else 'companion'} {module}.{part.suffixes[0]} is missing: "
                "without it the codes mean nothing; fetch the checkpoint again"
            )
        if found and part.needed is asymmetric and scheme.symmetric:
            raise FormatError(
                f"{stored[found[0]].name} is surplus: the config's quantization_config says that zero points are not "
                "used; take the config.json that belongs to the checkpoint"
            )
        if len(found) > 1 and not part.suffixes[0].endswith("*"):
            raise FormatError(
                f"{' and '.join(stored[each].name for each in found)} are both there, and one has to be; remove the "
                "one that is wrong, or fetch the checkpoint again"
            )
        parts |= {suffix: stored[suffix] for suffix in found}
    return parts


def _refuse_surplus(module: str, stored: Mapping[str, Stored], form: Format, parts: Mapping[str, Stored]) -> None:
    for suffix, tensor in stored.items():
        if suffix != form.codes and suffix not in parts and not _BESIDE.fullmatch(suffix):
            raise FormatError(
                f"{tensor.name} is surplus: it is no part of a weight stored like {stored[form.codes].name}, and what "
                "it does to it is not known; take the config.json that belongs to the checkpoint"
            )


def _check_part(weight: QuantizedWeight, part: Part) -> None:
    for suffix, tensor in weight.tensors.items():
        if suffix == weight.format.codes or not _is_part(suffix, part.suffixes):
            continue
        if part.dtypes and tensor.dtype not in part.dtypes:
            supported = ", ".join(plain(dtype) for dtype in part.dtypes)
            raise FormatError(f"{tensor.name} is stored in {plain(tensor.dtype)}; supported are {supported}")
        if part.shapes is not None and tensor.shape not in (allowed := part.shapes(weight.shape, weight.scheme)):
            sizes = weight.scheme.sizes(weight.shape)
            raise wrong_shape(tensor.name, tensor.shape, weight.name, weight.shape, sizes, allowed)


def _check_joints(weight: QuantizedWeight) -> None:
    """Parts of DeepSeek's layout hold whole blocks, or their scales do not join into one grid."""
    codes = weight.codes
    if codes.axis is None:
        return
    block = weight.scheme.sizes(weight.shape)[codes.axis]
    cut = [piece for piece in codes.pieces[:-1] if piece.shape[codes.axis] % block]
    if cut:
        raise FormatError(
            f"{weight.name} has {cut[0].shape[codes.axis]} of its {weight.shape[codes.axis]} "
            f"{'columns' if codes.axis else 'rows'} in {cut[0].file.name}, which is no multiple of the block size "
            f"{block}: the parts' scales do not join into one grid. Use the checkpoint in Hugging Face form"
        )


def _refuse_leftovers(
    stored: Mapping[str, Stored], quantization: Quantization | None, scheme: SourceScheme | None
) -> None:
    """Codes that the config has nothing for, and parts without codes."""
    weight = stored.get("weight")
    if weight is not None and weight.dtype == FP8:
        raise FormatError(
            f"{weight.name} is stored in float8_e4m3fn, but the config has no quantization_config "
            f"{'with a weight_block_size' if quantization is None else 'for it'}; take the config.json that belongs to "
            "the checkpoint"
        )
    for suffix in _PACKED & stored.keys():
        raise FormatError(
            f"{stored[suffix].name} holds codes in {plain(stored[suffix].dtype)}, and the config's quantization_config "
            f"{'has nothing for it' if scheme is None else f'says they are stored as {scheme.label}'}; take the "
            "config.json that belongs to the checkpoint"
        )
    for suffix, tensor in stored.items():
        if suffix != "weight" and _is_part(suffix):
            raise _surplus(tensor, weight, FORMATS[scheme.format] if scheme is not None else None)


def _surplus(part: Stored, weight: Stored | None, form: Format | None) -> FormatError:
    if weight is None:
        return FormatError(f"{part.name} has no weight beside it; the checkpoint is not whole: fetch it again")
    if weight.dtype not in PLAIN_DTYPES:
        supported = ", ".join(map(plain, form.dtypes if form is not None else CODES))
        return FormatError(
            f"{weight.name} is stored in {plain(weight.dtype)} with {part.name} beside it; supported are {supported}, "
            "under the name and with the quantization_config of the format: dequantize it with its own tools"
        )
    return FormatError(
        f"{part.name} is surplus: {weight.name} is stored in {plain(weight.dtype)}, not in codes; if the weight was "
        "dequantized already, remove its scale"
    )


def said_of(tensors: Mapping[str, Stored], quantization: Quantization | None) -> dict[str, str]:
    """What the files of ``tensors`` say of themselves; needed for torchao's weights alone, and empty for others."""
    if quantization is None or quantization.method != "torchao":
        return {}
    files = {piece.file: None for tensor in tensors.values() for piece in tensor.pieces}
    return {key: value for file in files for key, value in read_metadata(file).items()}
