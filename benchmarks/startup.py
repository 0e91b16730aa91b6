"""How long a server takes to be ready, and what memory it needs:  python -m benchmarks.startup [-- ARGUMENTS]

Starts `pagekv serve` --repeats times, with ARGUMENTS, and measures the time until /health answers and what the process
then holds, beyond its weights and its pool. Then one more process takes the same way step by step and tells what each
step costs. Times are told twice: by the clock, and as processor time, which other work on the machine hardly changes.
The last line printed is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import psutil  # type: ignore[import-untyped]

from benchmarks import report
from benchmarks.launch import COMMAND, free_port, stop, wait_until_healthy

MIB = 2**20
KV_MEMORY = 64 * MIB  # small, since a pool that nothing was written to may not be resident


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process until it is healthy; what it holds then, in MiB, its pool included."""

    seconds: float
    processor_seconds: float
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the way added."""

    name: str
    seconds: float
    processor_seconds: float
    mib: float


def start_once(arguments: list[str]) -> Start:
    port = free_port()
    command = [*COMMAND, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.NamedTemporaryFile(prefix="pagekv-startup-", suffix=".log") as log:
        begin = time.perf_counter()
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", server, log.name, interval=0.02)
            seconds = time.perf_counter() - begin
            process = psutil.Process(server.pid)
            times, memory = process.cpu_times(), process.memory_info()
            return Start(seconds, times.user + times.system, memory.rss / MIB)
        finally:
            stop(server)


def steps(dtype: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The way of `pagekv serve` in the order it is gone: what each step does, and a call that does it."""
    kept: dict[str, Any] = {}

    def load() -> None:
        import torch

        from model.load import load_model
        from model.source import resolve

        kept["model"] = load_model(
            resolve(None), dtype=getattr(torch, dtype), device=torch.device("cpu"), progress=False
        )

    def tokenizer() -> None:
        from server.tokenizer import Tokenizer

        kept["tokenizer"] = Tokenizer.load(str(kept["model"].source.path))

    yield "import torch", lambda: __import__("torch")
    yield "import the web framework", lambda: __import__("fastapi")
    yield "import the tokenizer's libraries", lambda: __import__("server.tokenizer")
    yield "import the server", lambda: __import__("server.serve")
    yield "import the engine", lambda: __import__("scheduler.engine_thread")
    yield "read, convert and digest the weights", load
    yield "make the tokenizer", tokenizer


def walk(dtype: str) -> list[Step]:
    """Goes the way in this process, which has imported nothing of it yet."""
    taken = []
    process = psutil.Process()
    for name, call in steps(dtype):
        clock, processor, before = time.perf_counter(), time.process_time(), process.memory_info().rss
        call()
        used = time.perf_counter() - clock, time.process_time() - processor
        taken.append(Step(name, *used, (process.memory_info().rss - before) / MIB))
    return taken


def walk_in_new_process(dtype: str) -> list[Step]:
    command = [sys.executable, "-m", "benchmarks.startup", "--walk", "--dtype", dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [Step(**step) for step in json.loads(done.stdout.splitlines()[-1])]


def weights_mib(dtype: str) -> float:
    """Of the default model, each parameter held once."""
    from math import prod

    from benchmarks.peer_models import DTYPES, default_model
    from model.gguf_config import config_from_gguf
    from model.gguf_file import GgufFile
    from model.tensors import expected_tensors

    shapes = expected_tensors(config_from_gguf(GgufFile(default_model().path)))
    return sum(prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize / MIB


def table(taken: list[Step]) -> str:
    rows = ["| step | seconds | processor seconds | MiB |", "|---|---:|---:|---:|"]
    rows += [f"| {s.name} | {s.seconds:.2f} | {s.processor_seconds:.2f} | {s.mib:.0f} |" for s in taken]
    return "\n".join(rows)


@click.command(help=__doc__)
@click.argument("arguments", nargs=-1)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Starts of the server.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--walk", "walking", is_flag=True, hidden=True)
def main(arguments: tuple[str, ...], repeats: int, dtype: str, walking: bool) -> None:
    if walking:
        print(json.dumps([asdict(step) for step in walk(dtype)]))
        return
    options = ["--dtype", dtype, "--kv-memory", str(KV_MEMORY), *arguments]
    starts = [start_once(options) for _ in range(repeats)]
    taken = walk_in_new_process(dtype)
    machine = report.hardware()
    ready = statistics.median(start.seconds for start in starts)
    processor = statistics.median(start.processor_seconds for start in starts)
    resident = statistics.median(start.resident_mib for start in starts)
    beyond = resident - weights_mib(dtype) - KV_MEMORY / MIB
    print(f"{report.describe(machine)}; pagekv serve {' '.join(options)}; medians of {repeats}.\n")
    print(f"Ready after {ready:.1f} s, of which {processor:.1f} s of processor time.")
    pool, weights = KV_MEMORY / MIB, weights_mib(dtype)
    print(f"Resident {resident:.0f} MiB: weights {weights:.0f}, pool up to {pool:.0f}, beyond {beyond:.0f}.")
    print(f"\n{table(taken)}\n")
    document = {
        "benchmark": "startup",
        "dtype": dtype,
        "serve_args": list(arguments),
        "hardware": machine,
        "starts": [asdict(start) for start in starts],
        "beyond_weights_and_pool_mib": round(beyond, 1),
        "steps": [asdict(step) for step in taken],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
