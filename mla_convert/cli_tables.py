"""What each command prints of its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_convert.units import format_bytes

if TYPE_CHECKING:
    from mla_convert import console
    from mla_convert.conversion_report import ConversionReport
    from mla_convert.demo import DemoReport
    from mla_convert.inspection_report import Inspection
    from mla_convert.judgement import VerificationReport
    from mla_convert.report import BenchmarkReport


def show_inspection(output: console.Output, report: Inspection) -> None:
    """What it is, the dimensions, each kind of tensor, and what is wrong."""
    output.facts(report.facts())
    if rows := report.dimension_rows():
        output.table("Dimensions", ["layers", "D", "H", "Q", "C", "N", "R", "V"], rows)
    if rows := report.kind_rows():
        output.table("Attention tensors", ["", "shape", "stored as", "number", "size"], rows)
    output.notes([*(f"problem: {each}" for each in report.problems), *report.notes])


def show_conversion(output: console.Output, report: ConversionReport) -> None:
    """The summary of a conversion: both sides with both figures, then sizes, time and error."""
    sides = [(name, side) for name, side in (("key side", report.qk), ("value side", report.vo)) if side is not None]
    rows = [[name, side.form, f"{side.factored:,}", f"{side.fused:,}"] for name, side in sides]
    if rows:
        output.table("Numbers read per decode step", ["", "stored as", "if factored", "if fused"], rows)
    facts = {
        "layers": f"{report.layers}",
        "read": format_bytes(report.bytes_in),
        "to be written" if report.dry_run else "written": f"{format_bytes(report.bytes_out)} in {report.stored_as}",
        "free on the disk": format_bytes(report.bytes_free),
        **(
            {"kept of what is read": f"{format_bytes(report.bytes_kept)} in {report.kept_in}"} if report.kept_in else {}
        ),
        "time": f"{report.seconds:.2f} s",
    }
    if report.largest_error is not None:
        where = "" if report.largest_error_tensor is None else f", {report.largest_error_tensor}"
        size = f"{report.largest_error:.2g} of the tensor's largest value{where}"
        facts["largest rounding error"] = size if report.largest_error else "none, every value is exact"
    output.facts(facts)
    if report.tensors:
        output.table("Requantized weights, against their float32 numbers", *report.tensor_rows())
    if report.quality is not None:
        output.table(report.quality.title, *report.quality.rows())
        output.table("On the original's hidden states", *report.quality.layer_rows())
    output.notes([*report.notes, f"nothing was written to {report.out}" if report.dry_run else f"wrote {report.out}"])


def show_verification(output: console.Output, report: VerificationReport) -> None:
    """What was compared, the figures of each stage, what broke which bound, and the verdict."""
    output.facts(report.summary())
    output.table("Distance from the original", *report.rows())
    output.notes([*report.failures, *report.notes, report.verdict])


def show_benchmark(output: console.Output, report: BenchmarkReport) -> None:
    """The table of a benchmark, what was patched, and where it ran."""
    output.table(report.title, report.columns, report.rows())
    output.notes([*str(report.patch).splitlines(), report.setting, *report.notes])


def show_demo(output: console.Output, report: DemoReport) -> None:
    """What was generated, the table, and the paths."""
    output.notes(["", "the original continues the prompt with:", "", *(report.prompt + report.text).splitlines(), ""])
    output.table("Patched beside the original, float32, one thread", report.columns, report.rows())
    output.notes([*report.failures, *report.notes, "", f"in {report.seconds:.0f} s; wrote"])
    output.notes([f"  {path}" for path in report.files])
