"""The checkpoint that ships with the package, taken through everything: convert, patch, verify, time, generate.

All of it runs in float32, where patched and original must agree within rounding, and on one thread: the example is so
small that threads would mostly wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from mla_convert.benchmark import bench
from mla_convert.conversion import convert
from mla_convert.conversion_report import ConversionReport
from mla_convert.divergence import largest
from mla_convert.errors import UsageError
from mla_convert.judgement import VerificationReport
from mla_convert.patches.apply import patched
from mla_convert.patches.loading import load_original
from mla_convert.paths import path_of
from mla_convert.quiet import no_loading_bars
from mla_convert.report import BenchmarkReport
from mla_convert.verification import verify

DEFAULT_OUT = "mla-demo"
#: Each form and what it is stored in: slices of the bfloat16 source are exact, fused products are not in 16 bits.
FORMS = {"factored": "source", "fused": "float32"}
CONTEXTS = (64, 1024, 4096)
REPETITIONS = 7
PROMPT = "def read(self, size=-1):\n"
NEW_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class DemoForm:
    """What came of one form; ``same_tokens`` says whether the patched model generated what the original did."""

    form: str
    conversion: ConversionReport
    verification: VerificationReport
    timing: BenchmarkReport
    text: str
    same_tokens: bool

    @property
    def passed(self) -> bool:
        """Whether it is the same model, by its logits and by what it generates."""
        return self.verification.passed and self.same_tokens


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """All of a demonstration: ``text`` is the original's continuation of ``prompt``, ``files`` what was written."""

    folder: str
    prompt: str
    text: str
    forms: tuple[DemoForm, ...]
    files: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every form passed."""
        return all(form.passed for form in self.forms)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        forms = [
            {"form": f.form, "passed": f.passed, "same_tokens": f.same_tokens, "text": f.text}
            | {part: getattr(f, part).to_dict() for part in ("conversion", "verification", "timing")}
            for f in self.forms
        ]
        facts = {name: getattr(self, name) for name in ("passed", "folder", "prompt", "text", "files", "seconds")}
        return facts | {"forms": forms}

    @property
    def columns(self) -> list[str]:
        """The heads of the closing table."""
        contexts = [f"speed at {row.context:,}" for row in self.forms[0].timing.contexts]
        return ["form", "logits differ by", "same model", "same text", *contexts]

    def rows(self) -> list[list[str]]:
        """The closing table: a row for each form; a speed of 2× is half the original's time for a step, by medians."""
        return [
            [
                form.form,
                f"{largest(stage.patched.largest_relative for stage in form.verification.stages):.1e}",
                "yes" if form.verification.passed else "NO",
                "yes" if form.same_tokens else "NO",
                *(f"{row.ratio.median:.2f}×" for row in form.timing.contexts),
            ]
            for form in self.forms
        ]

    @property
    def notes(self) -> list[str]:
        """What to know of the figures."""
        remark = (
            "Logits: largest difference, of their range. Speed: of a decode step at that context. The example is tiny, "
            "so at short contexts its steps are mostly Python; mla-convert bench SOURCE measures a real model."
        )
        return [remark, *(f"{form.form}: {note}" for form in self.forms for note in form.timing.notes)]

    @property
    def failures(self) -> list[str]:
        """What went wrong, a line each."""
        lines = [f"{form.form}: {line}" for form in self.forms for line in form.verification.failures]
        return lines + [f"{form.form}: generated {form.text!r}" for form in self.forms if not form.same_tokens]


def example_folder() -> pathlib.Path:
    """The trained checkpoint inside the package: deepseek_v3, bfloat16, 4 layers, 4,096 positions."""
    return pathlib.Path(__file__).parent / "example"


def demo(out: str | os.PathLike[str] | None = None, *, say: Callable[[str], None] = lambda line: None) -> DemoReport:
    """Convert the example in both forms, and verify, time and generate with each beside the original.

    Args:
        out: a new folder to write; by default ``mla-demo`` in the current one, with a number if that is there.
        say: called with a line for each thing that is done.

    Raises:
        UsageError: ``out`` is there already.
    """
    started = time.perf_counter()
    folder = _new_folder(out)
    with _one_thread():
        say(f"the example: {example_folder()}")
        with no_loading_bars():
            model = load_original(example_folder(), dtype=torch.float32)
        ids = generate(model)
        forms = tuple(_try(model, form, folder / form, ids, say) for form in FORMS)
    return DemoReport(
        folder=str(folder),
        prompt=PROMPT,
        text=_decode(ids),
        forms=forms,
        files=tuple(str(path) for path in sorted(folder.rglob("*")) if path.is_file()),
        seconds=time.perf_counter() - started,
    )


def _try(
    model: PreTrainedModel, form: str, folder: pathlib.Path, wanted: torch.Tensor, say: Callable[[str], None]
) -> DemoForm:
    say(f"{form}: converting")
    conversion = convert(example_folder(), folder, form=form, dtype=FORMS[form])
    say(f"{form}: verifying, patched beside original")
    verification = verify(model, folder)
    say(f"{form}: timing decode steps at contexts of {', '.join(f'{context:,}' for context in CONTEXTS)} tokens")
    timing = bench(model, folder, contexts=CONTEXTS, repetitions=REPETITIONS)
    say(f"{form}: generating")
    with patched(model, folder):
        found = generate(model)
    return DemoForm(form, conversion, verification, timing, _decode(found), torch.equal(found, wanted))


def generate(model: PreTrainedModel) -> torch.Tensor:
    """The most likely continuation of :data:`PROMPT`: the new tokens, int64 [n]."""
    given = _tokenizer()(PROMPT, return_tensors="pt")
    any_model: Any = model
    ids = any_model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    new: torch.Tensor = ids[0, given["input_ids"].shape[1] :]
    return new


def _decode(ids: torch.Tensor) -> str:
    return str(_tokenizer().decode(ids, skip_special_tokens=True))


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(example_folder())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _new_folder(out: str | os.PathLike[str] | None) -> pathlib.Path:
    """Make the folder that was asked for, or the first of ``mla-demo``, ``mla-demo-2``, … that is not there."""
    if out is not None:
        folder = path_of(out, "--out")
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise UsageError(f"{out} is there already and nothing is overwritten: give a new folder") from error
        except OSError as error:
            raise UsageError(f"{out} cannot be made ({error.strerror}): give a folder that can") from error
        return folder
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = pathlib.Path(DEFAULT_OUT if number == 1 else f"{DEFAULT_OUT}-{number}")
            folder.mkdir()
            return folder
    raise AssertionError
