"""The command line: options in, one library call, a table and JSON out.

Everything heavy is imported inside a command, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mla_convert import cli_tables, console, version
from mla_convert.cli_options import Absorbed, Codes, Dtype, Form, JsonTarget, Kept, KeptCodes, Link, Out, Source, Target
from mla_convert.cli_program import Program
from mla_convert.quiet import only_errors

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    if quiet:
        ctx.with_resource(only_errors())


@app.command()
def inspect(ctx: typer.Context, source: Source, json: JsonTarget = None) -> None:
    """Say what SOURCE is (a checkpoint, or what convert wrote), what can be converted, and what is wrong with it.

    Exits with 1 where something is.
    """
    output = console.Output(ctx.obj, json)
    from mla_convert.inspection import inspect_checkpoint

    report = inspect_checkpoint(source)
    cli_tables.show_inspection(output, report)
    output.json(report.to_dict())
    if not report.sound:
        raise typer.Exit(console.EXIT_CHECK_FAILED)


@app.command()
def convert(
    ctx: typer.Context,
    source: Source,
    out: Out,
    form: Annotated[
        Form, typer.Option(help="How both sides are kept; auto takes what reads fewer numbers per decode step.")
    ] = Form.auto,
    qk: Annotated[Form | None, typer.Option(help="The key side's form, where it differs from --form.")] = None,
    vo: Annotated[Form | None, typer.Option(help="The value side's form, where it differs from --form.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(metavar="DTYPE", help="What is stored: source, bfloat16, float16 or float32.")
    ] = Dtype.source,
    quantize: Annotated[Codes | None, typer.Option(help="Requantize both sides; by default they stay plain.")] = None,
    qk_bits: Annotated[
        int | None, typer.Option(metavar="4|8|16", help="Bits of the key side, where they differ; 16 leaves it plain.")
    ] = None,
    vo_bits: Annotated[
        int | None, typer.Option(metavar="4|8|16", help="Bits of the value side, where they differ.")
    ] = None,
    group_size: Annotated[
        str | None,
        typer.Option(
            metavar="N|row", help="int4: 32 (default), 64 or 128 columns; fp8: 128 (blocks of 128x128, default) or row."
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text on which codes are chosen and judged; loads and runs the model."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the model on held-out text and report what the codes cost.")
    ] = False,
    target: Annotated[
        Target, typer.Option(help="Absorbed weights alone, a whole model with them inside, or the same values anew.")
    ] = Target.sidecar,
    parts: Annotated[int | None, typer.Option(metavar="N", help="Parts of --target native; by default one.")] = None,
    link: Annotated[
        Link, typer.Option(help="How --target standalone takes the source's weights; auto copies where it must.")
    ] = Link.auto,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads of the pass; by default one for each core."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where products are formed: cpu, cuda, ….")] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with a run that was interrupted, or start afresh.")
    ] = True,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="A new repository on the hub that gets what was written.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME", help="The model's name on the hub, for the card, where SOURCE does not say it."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan everything, write nothing.")] = False,
    json: JsonTarget = None,
) -> None:
    """Precompute the absorbed weights of SOURCE and store them in OUT."""
    from mla_convert.ranks import launched

    world = launched()
    # Of several processes of one launch, only the first has something to say.
    output = console.Output(ctx.obj, json) if world.leads else console.Output(console.Verbosity.QUIET)
    from mla_convert.conversion import convert as run

    forms = {"form": form, "qk": qk, "vo": vo}
    targets = {"target": target, "parts": parts, "link": link}
    codes = {"quantize": quantize, "qk_bits": qk_bits, "vo_bits": vo_bits, "group_size": group_size}
    costs = {"calibrate": calibrate, "measure": measure, "push": push, "base_model": base_model}
    options = {"dtype": dtype, "workers": workers, "device": device, "resume": resume, "dry_run": dry_run}
    with output.progress("layers") as progress:
        report = run(source, out, progress=progress, world=world, **forms, **codes, **costs, **targets, **options)  # type: ignore[arg-type]
    if world.leads:
        cli_tables.show_conversion(output, report)
    output.json(report.to_dict())


@app.command()
def verify(
    ctx: typer.Context,
    source: Source,
    out: Absorbed = None,
    form: Annotated[Form, typer.Option(help="The form of both sides, where OUT does not decide it.")] = Form.auto,
    qk: Annotated[Form | None, typer.Option(help="The key side's form, where it differs from --form.")] = None,
    vo: Annotated[Form | None, typer.Option(help="The value side's form, where it differs from --form.")] = None,
    dtype: Annotated[Dtype, typer.Option(metavar="DTYPE", help="What the model is loaded in.")] = Dtype.float32,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to compare on, where SOURCE has a tokenizer.")
    ] = None,
    prefill: Annotated[int, typer.Option(metavar="N", help="Tokens given at once, before decoding.")] = 64,
    decode: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens decoded after them; by default 48, in lower precision 64.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences side by side; by default 4, in lower precision 4,096 / --decode."),
    ] = None,
    backend: Annotated[str, typer.Option(help="What computes attention in latent space.")] = "auto",
    codes: KeptCodes = Kept.auto,
    json: JsonTarget = None,
) -> None:
    """Compare SOURCE with itself patched, at every position: is it still the same model?

    Exits with 1 where it is not.
    """
    output = console.Output(ctx.obj, json)
    from mla_convert.verification import verify as run

    forms = {"form": form, "qk": qk, "vo": vo}
    options = {"dtype": dtype, "prompts": prompts, "decode": decode, "batch": batch, "backend": backend, "codes": codes}
    with output.progress("calls") as progress:
        report = run(source, out, prefill=prefill, progress=progress, **forms, **options)  # type: ignore[arg-type]
    cli_tables.show_verification(output, report)
    output.json(report.to_dict())
    if not report.passed:
        raise typer.Exit(console.EXIT_CHECK_FAILED)


@app.command()
def bench(
    ctx: typer.Context,
    source: Source,
    out: Absorbed = None,
    context: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Tokens that the new one sees; by default 64,1024,4096 where they fit."),
    ] = None,
    form: Annotated[Form, typer.Option(help="The form of both sides, where OUT does not decide it.")] = Form.auto,
    qk: Annotated[Form | None, typer.Option(help="The key side's form, where it differs from --form.")] = None,
    vo: Annotated[Form | None, typer.Option(help="The value side's form, where it differs from --form.")] = None,
    dtype: Annotated[Dtype, typer.Option(metavar="DTYPE", help="What the model is loaded in.")] = Dtype.source,
    device: Annotated[str, typer.Option(help="Where it runs: cpu, cuda, ….")] = "cpu",
    backend: Annotated[str, typer.Option(help="What computes attention in latent space.")] = "auto",
    codes: KeptCodes = Kept.auto,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences decoded at once.")] = 1,
    repetitions: Annotated[int, typer.Option(metavar="N", help="Timed steps of each model and context.")] = 20,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the times: a new .png, .svg or .pdf.")] = None,
    json: JsonTarget = None,
) -> None:
    """Time a decode step of SOURCE as it is and as patched, in turns."""
    output = console.Output(ctx.obj, json)
    contexts = None if context is None else console.whole_numbers("--context", context)
    from mla_convert.benchmark import bench as run
    from mla_convert.report import check_plot, save_plot

    if plot is not None:
        check_plot(plot)
    forms = {"form": form, "qk": qk, "vo": vo}
    options = {"dtype": dtype, "device": device, "backend": backend, "codes": codes, "repetitions": repetitions}
    options["batch"] = batch
    with output.progress("steps") as progress:
        report = run(source, out, contexts=contexts, progress=progress, **forms, **options)  # type: ignore[arg-type]
    cli_tables.show_benchmark(output, report)
    if plot is not None:
        save_plot(report, plot)
        output.notes([f"wrote {plot}"])
    output.json(report.to_dict())


@app.command()
def demo(
    ctx: typer.Context,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A new folder; by default mla-demo here, with a number if that is there."),
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Convert, patch, verify and time the checkpoint that ships with this program, and let it write."""
    output = console.Output(ctx.obj, json)
    from mla_convert.demo import demo as run

    report = run(out, say=lambda line: output.notes([line]))
    cli_tables.show_demo(output, report)
    output.json(report.to_dict())
    if not report.passed:
        raise typer.Exit(console.EXIT_CHECK_FAILED)
