"""The command line: options in, one library call, a table and JSON out.

Everything heavy is imported inside a command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer
import typer.core

from mla_convert import console, version


class _Program(typer.core.TyperGroup):
    """The group of commands, with every command run inside the error boundary."""

    def invoke(self, ctx: Any) -> Any:
        with console.error_boundary():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Form(enum.StrEnum):
    """How one side of the attention keeps its weights."""

    auto = "auto"
    factored = "factored"
    fused = "fused"


class Dtype(enum.StrEnum):
    """What absorbed weights are stored in."""

    source = "source"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON to a new file, or to stdout."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-convert {version.__version__}")
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done, and where errors arise.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Decode DeepSeek-style (MLA) models in latent space, and prove that nothing changed.

    Exit codes: 0 fine, 1 a check failed, 2 the input or the call is at fault.
    """
    ctx.obj = console.Verbosity.choose(quiet=quiet, verbose=verbose)
    console.set_up_logging(ctx.obj)
