"""What a conversion will store: the options, checked, and for every layer its forms and tensors. Reads no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.architectures import Family, LayerSpec
from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import FormatError, UsageError
from mla_convert.formats import plain
from mla_convert.forms import FORMS, Form, Forms, choose_form
from mla_convert.manifest import KEYS, SUFFIXES, StoredTensor, stored_shape
from mla_convert.schemes import Scheme
from mla_convert.wording import option

Side = Literal["qk", "vo"]
SIDES: tuple[Side, ...] = ("qk", "vo")
TARGETS = ("sidecar", "standalone", "hf", "native")
SIDE_NAMES = {"qk": "key side", "vo": "value side"}
NOT_CODED: Mapping[Side, Scheme | None] = {"qk": None, "vo": None}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True)
class PlannedLayer:
    """What is stored for one layer: its spec, forms, and the tensors as they will be, without error figures."""

    spec: LayerSpec
    forms: Forms
    tensors: dict[str, StoredTensor]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source tensors that go into it."""
        names = [self.spec.kv_b]
        if self.forms.qk == "fused":
            names.append(self.spec.query)
        if self.forms.vo == "fused":
            names.append(self.spec.o)
        return tuple(names)


def plan_layers(
    checkpoint: Checkpoint,
    wanted: Mapping[Side, str],
    dtype: torch.dtype | None,
    schemes: Mapping[Side, Scheme | None] = NOT_CODED,
) -> tuple[PlannedLayer, ...]:
    """What will be stored for every layer, those for multi-token prediction included; reads no data.

    ``wanted`` maps ``qk`` and ``vo`` to ``factored``, ``fused`` or ``auto``, and ``schemes`` to how the side is coded;
    ``dtype`` None is the source's. UsageError where a family's side may not be fused and is asked to be, and where a
    weight does not divide into a scheme's groups.
    """
    specs = (*checkpoint.layers, *checkpoint.extra_layers)
    return tuple(_plan_layer(checkpoint, spec, wanted, dtype, schemes) for spec in specs)


def _plan_layer(
    checkpoint: Checkpoint,
    spec: LayerSpec,
    wanted: Mapping[Side, str],
    dtype: torch.dtype | None,
    schemes: Mapping[Side, Scheme | None],
) -> PlannedLayer:
    best = choose_form(spec.geometry)
    forms = Forms(
        qk=_choose("qk", wanted["qk"], best.qk, spec.family), vo=_choose("vo", wanted["vo"], best.vo, spec.family)
    )
    tensors = {}
    sides: tuple[tuple[Side, Form, str], ...] = (("qk", forms.qk, spec.query), ("vo", forms.vo, spec.o))
    for side, form, other in sides:
        key = KEYS[side, form]
        source_dtype = checkpoint.source_dtype(spec.kv_b)
        if form == "fused":
            source_dtype = torch.promote_types(source_dtype, checkpoint.source_dtype(other))
        if source_dtype not in FLOAT_DTYPES:
            raise FormatError(
                f"{spec.kv_b} is stored as {plain(source_dtype)}; supported are "
                f"{', '.join(map(plain, FLOAT_DTYPES))}: take the checkpoint in one of these forms"
            )
        name = f"{spec.prefix}.{SUFFIXES[key]}"
        shape, scheme = stored_shape(key, spec.geometry), schemes[side]
        if scheme is not None:
            scheme.check(name, shape)
        tensors[key] = StoredTensor(name, shape, dtype or source_dtype, scheme=scheme)
    return PlannedLayer(spec, forms, tensors)


def _choose(side: Side, wanted: str, best: Form, family: Family) -> Form:
    between = family.between(side)
    if wanted == "auto":
        return "factored" if between else best
    if wanted == "fused" and between:
        raise UsageError(
            f"the {SIDE_NAMES[side]} of {family.model_type} cannot be fused: {between}; use "
            f"{option(side, 'factored')} or auto"
        )
    return "fused" if wanted == "fused" else "factored"


def parse_forms(form: str, qk: str | None, vo: str | None) -> dict[Side, str]:
    """What is wanted of each side: its own option, else ``form``; each is ``factored``, ``fused`` or ``auto``.

    UsageError for anything else, and for a ``form`` that neither side is to have.
    """
    for name, given in (("form", form), ("qk", qk), ("vo", vo)):
        if given not in (*FORMS, "auto") and (given is not None or name == "form"):
            raise UsageError(f"{option(name, given)} is not known; supported are {', '.join(FORMS)} and auto")
    wanted: dict[Side, str] = {"qk": form if qk is None else qk, "vo": form if vo is None else vo}
    if form != "auto" and form not in wanted.values():
        raise UsageError(
            f"{option('form', form)} was asked for, and {option('qk', qk)} and {option('vo', vo)}, which leave no side "
            f"to it: leave {option('form')} out, or one of the two"
        )
    return wanted


def parse_dtype(given: str | torch.dtype) -> torch.dtype | None:
    """The stored dtype; None for the source's. UsageError for dtypes that are not stored."""
    name = plain(given) if isinstance(given, torch.dtype) else given
    if name == "source":
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"{option('dtype', name)}; supported are source, {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(given: str | torch.device) -> torch.device:
    """The device, tried; UsageError where it is not there."""
    try:
        return torch.empty(0, device=given).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{option('device', str(given))} cannot be used here ({reason}); use cpu, or one that is there"
        ) from error


def refuse_recipe(target: str, **options: object) -> None:
    """UsageError where an option that changes values is given for a target that keeps them."""
    for name, value in options.items():
        if value not in (None, "auto", "source"):
            raise UsageError(
                f"{option(name, value)}: {option('target', target)} keeps every value as it is; leave it out"
            )


def check_options(target: str, parts: int | None, workers: int | None, max_shard_bytes: int | None, link: str) -> None:
    """UsageError where one of these cannot be."""
    if target not in TARGETS:
        raise UsageError(f"{option('target', target)}; supported are {', '.join(TARGETS)}")
    if parts is not None and target != "native":
        raise UsageError(
            f"{option('parts', parts)} belongs to {option('target', 'native')}, and this is {target}; leave it out"
        )
    if link != "auto" and target != "standalone":
        raise UsageError(
            f"{option('link', link)} belongs to {option('target', 'standalone')}, and this is {target}; leave it out"
        )
    if parts is not None and (type(parts) is not int or parts < 1):
        raise UsageError(f"{option('parts', parts)}; a native checkpoint has a whole number of parts, one or more")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(
            f"{option('workers', workers)}; a run needs a whole number of threads, one or more: leave it out"
        )
    if max_shard_bytes is not None and (type(max_shard_bytes) is not int or max_shard_bytes < 1):
        raise UsageError(f"max_shard_bytes={max_shard_bytes!r}; a shard needs a whole, positive number of bytes")
