"""How commands are run: what they print goes to any terminal, and what they raise becomes one line."""

from __future__ import annotations

from typing import Any

import typer.core

from mla_convert import console
from mla_convert.wording import as_typed


class Program(typer.core.TyperGroup):
    """The group of commands, with every command run inside the error boundary."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        console.print_anything()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with console.error_boundary(), as_typed():
            return super().invoke(ctx)
