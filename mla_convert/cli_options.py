"""Options and arguments that commands have in common, and the words that they take."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Form(enum.StrEnum):
    """How one side of the attention keeps its weights."""

    auto = "auto"
    factored = "factored"
    fused = "fused"


class Target(enum.StrEnum):
    """What convert writes."""

    sidecar = "sidecar"
    standalone = "standalone"
    hf = "hf"
    native = "native"


class Link(enum.StrEnum):
    """How files of the source are taken over."""

    auto = "auto"
    hard = "hard"
    reflink = "reflink"
    copy = "copy"


class Dtype(enum.StrEnum):
    """What absorbed weights are stored in."""

    source = "source"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Codes(enum.StrEnum):
    """What absorbed weights are requantized to."""

    int8 = "int8"
    fp8 = "fp8"
    int4 = "int4"


class Kept(enum.StrEnum):
    """What a patched model holds of a quantized OUT."""

    auto = "auto"
    keep = "keep"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="Folder of the checkpoint, or org/name\\[@revision] on the hub.", show_default=False
    ),
]
Out = Annotated[
    str,
    typer.Argument(metavar="OUT", help="Folder to write; SOURCE itself means SOURCE/mla_absorbed.", show_default=False),
]
Absorbed = Annotated[
    str | None,
    typer.Argument(
        metavar="OUT",
        help="Folder that convert wrote; without it, SOURCE/mla_absorbed where that is there, else made on the fly.",
        show_default=False,
    ),
]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON to a new file, or to stdout."),
]
KeptCodes = Annotated[
    Kept,
    typer.Option(help="Of a quantized OUT: what is fastest, or its codes in memory whatever that costs."),
]
