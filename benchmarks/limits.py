"""What the machine allows:  python -m benchmarks.limits [--results FILE]

Measures the rate of matrix products and the bandwidth of memory, and from them the least time that each case of
`make bench` can take with the default model. With the JSON document of a bench run (FILE, or - for standard input),
also which fraction of that limit was reached. The last line printed is one JSON document.

A forward pass takes at least what its multiplications take at the measured rate of a large product, and at least what
it takes to read each weight and each key and value once at the measured bandwidth: the larger of the two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TextIO

import click
import torch

from benchmarks import cases, report
from benchmarks.peer_models import default_model
from model.config import ModelConfig
from model.gguf_config import config_from_gguf
from model.gguf_file import GgufFile
from model.tensors import expected_tensors

SMALLEST_PRODUCT, LARGEST_PRODUCT = 256, 2048  # rows and columns of the product that is timed
ENOUGH_SECONDS = 0.03  # of one product: a larger one would only take longer, where a dtype has no instructions
STREAM_BYTES = 512 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Machine:
    """Multiplications and additions per second by dtype (a multiply-add is two), and bytes per second."""

    float32: float
    bfloat16: float
    read: float
    copy: float  # bytes copied, each read once and written once


def least_seconds(call: Callable[[], object], runs: int) -> float:
    """Of the fastest run: a limit is what the machine can do, not what it did while others were at it."""
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def product_rate(dtype: torch.dtype, runs: int) -> float:
    """Operations per second in a product of square matrices, the largest that takes no unreasonable time."""
    size = SMALLEST_PRODUCT
    while size < LARGEST_PRODUCT and product_seconds(size, dtype, 1) < ENOUGH_SECONDS:
        size *= 2
    return 2 * size**3 / product_seconds(size, dtype, runs)


def product_seconds(size: int, dtype: torch.dtype, runs: int) -> float:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return least_seconds(lambda: left @ right, runs)


def measure_machine(runs: int) -> Machine:
    with torch.inference_mode():
        rates = {name: product_rate(dtype, runs) for name, dtype in DTYPES.items()}
        source = torch.randn(STREAM_BYTES // 4)
        target = torch.empty_like(source)
        return Machine(
            rates["float32"],
            rates["bfloat16"],
            STREAM_BYTES / least_seconds(source.sum, runs),
            STREAM_BYTES / least_seconds(lambda: target.copy_(source), runs),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of one request that a step computes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one network: parameters of the blocks and of the head, bytes of all weights, and per position and layer."""

    block_parameters: int
    head_parameters: int
    weight_bytes: float
    attention_size: int  # query heads x head size x layers
    kv_bytes: int  # a position, all layers

    @classmethod
    def of(cls, config: ModelConfig, item_bytes: float, kv_item_bytes: int) -> Costs:
        shapes = expected_tensors(config)
        head = config.vocab_size * config.hidden_size
        blocks = sum(prod(shape) for name, shape in shapes.items() if ".layers." in name)
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_item_bytes
        attention = config.num_layers * config.num_heads * config.head_dim
        return cls(blocks, head, (blocks + head) * item_bytes, attention, kv)

    def operations(self, spans: Sequence[Span]) -> float:
        """Each position goes through the blocks and attends to all before it; each span's last one through the head."""
        positions = sum(span.end - span.start for span in spans)
        attended = sum((span.end**2 - span.start**2) / 2 for span in spans)
        return (
            2 * self.block_parameters * positions
            + 4 * self.attention_size * attended
            + 2 * self.head_parameters * len(spans)
        )

    def bytes_read(self, spans: Sequence[Span], shared: int = 0) -> float:
        """All weights once, and K/V of every request; of `shared` leading positions once for all."""
        return self.weight_bytes + self.kv_bytes * (shared + sum(span.end - shared for span in spans))


@dataclass(frozen=True, slots=True)
class Limits:
    machine: Machine
    costs: Costs
    rate: float

    def step(self, spans: Sequence[Span], shared: int = 0) -> float:
        """Seconds that one forward pass over `spans` takes at least."""
        operations = self.costs.operations(spans) / self.rate
        return max(operations, self.costs.bytes_read(spans, shared) / self.machine.read)

    def decode(self, requests: int) -> float:
        """Halfway through what the case generates."""
        position = cases.DECODE_PROMPT + cases.DECODE_TOKENS // 2
        return self.step([Span(position, position + 1)] * requests)

    def load(self) -> float:
        """The shared prompt once, then wave after wave: its own tokens, then one token after the other."""
        at_once, shared, end = cases.LOAD_AT_ONCE, cases.LOAD_SHARED, cases.LOAD_SHARED + cases.LOAD_OWN
        prefill = self.step([Span(shared, end)] * at_once, shared)
        middle = end + cases.LOAD_TOKENS // 2
        decode = self.step([Span(middle, middle + 1)] * at_once, shared) * (cases.LOAD_TOKENS - 1)
        return self.step([Span(0, shared)]) + cases.LOAD_REQUESTS // at_once * (prefill + decode)

    def lost(self) -> float:
        """Its blocks at even distances."""
        count = round(cases.LONG // cases.BLOCK_SIZE * cases.LOST_PER_CENT / 100)
        starts = [cases.LONG * index // count for index in range(count)]
        gaps = [Span(start, start + cases.BLOCK_SIZE) for start in starts]
        operations = self.costs.operations(gaps) - 2 * self.costs.head_parameters * (count - 1)
        whole = self.costs.weight_bytes + self.costs.kv_bytes * cases.LONG
        return max(operations / self.rate, whole / self.machine.read)

    def floors(self) -> dict[str, float]:
        """Case -> the least its first quantity can be, in that quantity's unit."""
        long, tail = cases.LONG, cases.LONG - cases.TAIL
        seconds = {
            "cold-128": self.step([Span(0, 128)]),
            "cold-512": self.step([Span(0, 512)]),
            "cold-2048": self.step([Span(0, long)]),
            "warm-2048": self.step([Span(long - 1, long)]),
            "tail-2048": self.step([Span(tail, long)]),
            "edited-2048": self.step([Span(cases.EDITED, long)]),
            **{f"decode-{count}": self.decode(count) for count in (1, 4, 8, 16)},
            "lost-5": self.lost(),
        }
        return {**{name: value * 1e3 for name, value in seconds.items()}, "load": self.load()}


def table(floors: dict[str, float], results: dict[str, Any]) -> str:
    """Markdown: the floor, and what was measured, where it was."""
    rows = ["| case | floor | measured | of the limit |", "|---|---:|---:|---:|"]
    for case in cases.CASES:
        floor = floors[case.name]
        unit = "s" if case.name == "load" else "ms"
        measured = measured_median(results, case.name)
        seen = (
            ["", ""] if measured is None else [f"{report.digits(measured)} {unit}", f"{100 * floor / measured:.0f} %"]
        )
        rows.append(f"| {case.title} | {report.digits(floor)} {unit} | {seen[0]} | {seen[1]} |")
    return "\n".join(rows)


def measured_median(results: dict[str, Any], case: str) -> float | None:
    quantities = results.get(case)
    return float(next(iter(quantities.values()))["median"]) if quantities else None


def told(machine: Machine) -> str:
    return (
        f"float32 product {machine.float32 / 1e9:.0f} GFLOP/s, bfloat16 {machine.bfloat16 / 1e9:.0f} GFLOP/s, "
        f"read {machine.read / 1e9:.1f} GB/s, copy {machine.copy / 1e9:.1f} GB/s"
    )


def last_document(file: TextIO | None) -> dict[str, Any]:
    """The results of the JSON document on the last line that is one."""
    lines = [line for line in file or () if line.startswith("{")]
    if file is not None and not lines:
        raise click.BadParameter("there is no JSON document in it", param_hint="--results")
    found: dict[str, Any] = json.loads(lines[-1])["results"] if lines else {}
    return found


@click.command(help=__doc__)
@click.option("--results", type=click.File(), help="What benchmarks.serve printed; - for standard input.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(list(DTYPES)), help="Computed with.")
@click.option("--shipped", is_flag=True, help="The weights that are read are the file's own, quantized.")
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads; the default is one per core.")
@click.option("--runs", default=10, show_default=True, type=click.IntRange(min=1), help="Of each measurement.")
def main(results: TextIO | None, dtype: str, shipped: bool, threads: int | None, runs: int) -> None:
    found = last_document(results)
    hardware = report.hardware()
    torch.set_num_threads(threads or hardware["cores"])
    machine = measure_machine(runs)
    file = GgufFile(default_model().path)
    config = config_from_gguf(file)
    item = DTYPES[dtype].itemsize
    stored = sum(file.nbytes(name) for name in file.tensors) / sum(prod(file.shape(name)) for name in file.tensors)
    limits = Limits(machine, Costs.of(config, stored if shipped else item, item), getattr(machine, dtype))
    floors = limits.floors()
    print(f"{report.describe(hardware)}: {told(machine)}\n")
    print(f"{table(floors, found)}\n")
    document = {
        "benchmark": "limits",
        "hardware": hardware,
        "machine": asdict(machine),
        "dtype": dtype,
        "shipped": shipped,
        "floors": {name: round(value, 3) for name, value in floors.items()},
        "fractions": {
            name: round(floor / seen, 3) for name, floor in floors.items() if (seen := measured_median(found, name))
        },
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
