"""What fewer bits cost: KL to the original on held-out text, with memory and step time beside.

    python benchmarks/quality.py [--only int8 int4] [--windows N] [--json FILE]

The checkpoint that ships with the package, in float32, factored, over all of its held-out text in windows of 256
tokens: 64 at once, then one per step. Each configuration is compared with the original model position by position;
those with a limit must keep to it, or the script exits with 1. Beside it stand the bytes of the weights as they are
stored, the bytes that a model in float32 and one in bfloat16 hold of them, those of a cached token, and the time of a
step in both, one sequence, all configurations in turns, at the end. All windows take about ten minutes on
two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import recording
import torch
from decode_step import with_cache
from transformers import DynamicCache

import mla_convert
from mla_convert.checkpoint import Checkpoint
from mla_convert.machine import describe_machine
from mla_convert.patches.layer import layer_of
from mla_convert.patches.loading import load_original
from mla_convert.prompts import read_prompts
from mla_convert.quality import PREFILL, Quality, Windows, coded_projections, cut_windows, measure, read
from mla_convert.quantization import quantize
from mla_convert.quiet import no_loading_bars
from mla_convert.schemes import Scheme, parse_schemes

DTYPES = (torch.float32, torch.bfloat16)
EXAMPLE = pathlib.Path(mla_convert.__file__).parent / "example"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to spend fewer bits.

    ``convert`` are options of ``mla_convert.convert`` (None: absorbed weights are derived from the model), ``patch``
    those of ``mla_convert.patch``. ``unabsorbed`` codes ``kv_b_proj`` in the original model instead of patching it.
    ``limit`` is the largest mean KL allowed.
    """

    name: str
    convert: dict[str, Any] | None = None
    patch: dict[str, Any] = dataclasses.field(default_factory=dict)
    unabsorbed: dict[str, Any] | None = None
    limit: float | None = None


CONFIGURATIONS = [
    Configuration("float32", limit=1e-9),
    Configuration("weights int8", {"quantize": "int8"}, limit=1e-4),
    Configuration("weights fp8 128x128", {"quantize": "fp8"}),
    Configuration("weights fp8 per row", {"quantize": "fp8", "group_size": "row"}),
    Configuration("weights int4 g32", {"quantize": "int4", "group_size": 32}, limit=1.5e-3),
    Configuration("weights int4 g64", {"quantize": "int4", "group_size": 64}),
    Configuration("weights int8, values int4 g32", {"quantize": "int8", "vo_bits": 4}),
    Configuration("cache int8", patch={"cache": "latent:int8"}, limit=2e-4),
    Configuration("cache int8 g32", patch={"cache": "latent:int8:32"}),
    Configuration("cache fp8", patch={"cache": "latent:fp8"}, limit=1e-3),
    Configuration("cache int4", patch={"cache": "latent:int4"}, limit=4e-3),
    Configuration("cache int4 g32", patch={"cache": "latent:int4:32"}),
    Configuration("kv_b_proj int8, unabsorbed", unabsorbed={"quantize": "int8"}),
    Configuration("kv_b_proj fp8 128x128, unabsorbed", unabsorbed={"quantize": "fp8"}),
    Configuration("kv_b_proj int4 g32, unabsorbed", unabsorbed={"quantize": "int4"}),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration's figures.

    ``stored_bytes`` are those of the sidecar's tensors (of ``kv_b_proj``'s codes where nothing is absorbed);
    ``weight_bytes``, ``cache_bytes_per_token`` (of one layer, room to grow included) and ``step_ms`` are of the model
    by its dtype.
    """

    name: str
    quality: Quality
    stored_bytes: int
    limit: float | None
    weight_bytes: dict[str, int]
    cache_bytes_per_token: dict[str, float]
    step_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether the mean KL is within the limit, if there is one."""
        return self.limit is None or self.quality.mean_kl <= self.limit


def schemes_of(given: dict[str, Any]) -> tuple[Scheme | None, Scheme | None]:
    """The schemes of both sides by ``convert``'s options."""
    return parse_schemes(given.get("quantize"), given.get("qk_bits"), given.get("vo_bits"), given.get("group_size"))


def prepare(configuration: Configuration, folder: pathlib.Path) -> tuple[pathlib.Path | None, int]:
    """The sidecar of a configuration, if it has one, and the bytes that its weights are stored in."""
    checkpoint = Checkpoint.open(EXAMPLE)
    rows = [checkpoint.weight(spec.kv_b, torch.float32) for spec in checkpoint.layers]
    if configuration.unabsorbed is not None:
        scheme = schemes_of(configuration.unabsorbed)[0]
        assert scheme is not None
        coded = [quantize(weight, scheme) for weight in rows]
        return None, sum(part.nbytes for one in coded for part in one.parts().values())
    if configuration.convert is None:
        return None, sum(weight.nbytes for weight in rows)
    out = folder / configuration.name.replace(" ", "-")
    options = {"form": "factored", "dtype": "float32"} | configuration.convert
    return out, mla_convert.convert(EXAMPLE, out, **options).bytes_out


def configured(model: Any, configuration: Configuration, sidecar: pathlib.Path | None) -> Any:
    """A context manager: ``model`` as the configuration has it."""
    if configuration.unabsorbed is not None:
        return coded_projections(model, *schemes_of(configuration.unabsorbed))
    return mla_convert.patched(model, sidecar, **({"form": "factored"} | configuration.patch))


def weight_bytes(model: Any) -> int:
    """Bytes of all absorbed weights in memory; of ``kv_b_proj`` where nothing is patched."""
    layers = [layer for module in model.modules() if (layer := layer_of(module)) is not None]
    if layers:
        return sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    return sum(weight.nbytes for name, weight in model.named_parameters() if "kv_b_proj" in name)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an object holds, in its attributes, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in tensors_of(item))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in tensors_of(item))
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


class Steps:
    """One model with a cache of 256 tokens, that takes a step and forgets it."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.token = model, ids[:1, :1]
        self.cache: Any = DynamicCache(config=model.config)
        self.given = with_cache(model, self.cache)
        model(ids[:1], **self.given)
        model(self.token, **self.given)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(self.cache.layers)}
        self.length = self.cache.get_seq_length()
        assert self.length == ids.shape[1] + 1
        held = sum(tensor.nbytes for tensor in storages.values())
        self.bytes_per_token = held / self.length / len(self.cache.layers)

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.model(self.token, **self.given)
        elapsed = time.perf_counter() - start
        self.cache.crop(-1)
        return elapsed


@torch.inference_mode()
def compare(configurations: list[Configuration], windows: Windows, repetitions: int) -> list[Row]:
    """Measure every configuration on its own copies of the model; then time the steps of all in turns."""
    with no_loading_bars():
        originals = {str(dtype).removeprefix("torch."): load_original(EXAMPLE, dtype=dtype) for dtype in DTYPES}
    reference = read(originals["float32"], windows)
    rows: list[Row] = []
    steps: dict[tuple[int, str], Steps] = {}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, configuration in enumerate(configurations):
            sidecar, stored = prepare(configuration, folder)
            models = {name: copy.deepcopy(original) for name, original in originals.items()}
            for name, model in models.items():
                stack.enter_context(configured(model, configuration, sidecar))
                steps[number, name] = Steps(model, windows.ids)
            quality = measure(reference, read(models["float32"], windows), windows)
            weights = {name: weight_bytes(model) for name, model in models.items()}
            cached = {name: steps[number, name].bytes_per_token for name in models}
            rows.append(Row(configuration.name, quality, stored, configuration.limit, weights, cached))
            print(line(rows[-1]), flush=True)
        times: dict[tuple[int, str], list[float]] = {key: [] for key in steps}
        for _ in range(repetitions):
            for key, one in steps.items():
                times[key].append(one.step())
    for (number, name), mine in times.items():
        rows[number].step_ms[name] = statistics.median(mine) * 1e3
    return rows


HEADER = (
    f"{'configuration':<36} {'mean KL':>9} {'median':>9} {'p99':>9} {'experts':>8} {'perplexity':>10} "
    f"{'stored kB':>9} {'float32 kB':>10} {'bfloat16 kB':>11} {'cache B/tok':>11} {'limit':>8}"
)


def line(row: Row) -> str:
    """A row for people, without its time."""
    found = row.quality
    limit = "" if row.limit is None else f"{row.limit:.1e}{'' if row.kept else ' BROKEN'}"
    return (
        f"{row.name:<36} {found.mean_kl:9.2e} {found.median_kl:9.2e} {found.p99_kl:9.2e} {found.changed_experts:8d} "
        f"{found.perplexity:10.4f} {row.stored_bytes / 1e3:9.1f} {row.weight_bytes['float32'] / 1e3:10.1f} "
        f"{row.weight_bytes['bfloat16'] / 1e3:11.1f} {row.cache_bytes_per_token['float32']:11.0f} {limit:>8}"
    )


def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="configurations whose names contain one of these")
    parser.add_argument("--windows", type=int, help="how many windows; by default all of the text")
    parser.add_argument("--repetitions", type=int, default=50, help="timed steps of each configuration")
    recording.add_json(parser)
    args = parser.parse_args()
    chosen = [c for c in CONFIGURATIONS if not args.only or any(word in c.name for word in args.only)]
    text = read_prompts(EXAMPLE, 1024)
    windows = cut_windows(text, args.windows)
    print(
        f"{len(text.stream)} tokens, {len(windows.ids)} windows, {int(windows.counted.sum())} positions after {PREFILL}"
    )
    print(HEADER)
    rows = compare(chosen, windows, args.repetitions)
    print("milliseconds per step, one sequence, history 256, in turns; bytes stored, and of a cached token in a layer:")
    for row in rows:
        each = ", ".join(
            f"{name} {row.step_ms[name]:7.3f} ms {row.cache_bytes_per_token[name]:5.0f} B" for name in row.step_ms
        )
        print(f"{row.name:<36} {row.stored_bytes / 1e3:9.1f} kB, {each}")
    result = {
        "machine": dataclasses.asdict(describe_machine(torch.device("cpu"))),
        "windows": len(windows.ids),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    recording.write(parser, args, result)
    sys.exit(0 if all(row.kept for row in rows) else 1)


if __name__ == "__main__":
    main()
