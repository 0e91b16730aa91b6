"""Where the time of a step goes:  python -m benchmarks.steps

Starts a server of ours with a stopwatch inside, lets 1, 4, 8 and 16 requests decode at once, over HTTP as users do,
greedy, sampled and held to a grammar, and splits each step into its parts. Prompts come from a fixed seed; every number
is a median over steps. "Around" is the share of a step and the pause after it that is not the network's; "event loop"
is what the other thread of the process worked meanwhile. The last line printed is one JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import report
from benchmarks.cases import DECODE_PROMPT, Bench, random_prompt, warm_up
from benchmarks.client import BenchmarkError, complete, served_model
from benchmarks.launch import free_port, running
from benchmarks.stopwatch import NETWORK, PARTS

REQUESTS = (1, 4, 8, 16)
RECORDS = {  # longer than what is decoded: a text that is complete has only an end to be held to
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "size", "kind"],
    },
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "guided": {"structured_outputs": {"json": RECORDS}},
}

Record = dict[str, Any]
"""One step, as benchmarks.stopwatch wrote it down."""

Split = dict[str, float]
"""Part -> median milliseconds. "step" is all of it; "event loop" is beside it."""


async def decode(base: str, kinds: Sequence[str], tokens: int, seed: int) -> str:
    """Has the server decode; returns the model's name."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=base, timeout=600) as client:
        model = (await served_model(client)).id
        await warm_up(Bench(client, model, random.Random("warm up")))
        for kind in kinds:
            for requests in REQUESTS:
                prompts = [random_prompt(rng, DECODE_PROMPT) for _ in range(requests)]
                await asyncio.gather(*(complete(client, model, prompt, tokens, **KINDS[kind]) for prompt in prompts))
    return model


def split(records: Sequence[Record], clock: str) -> Split:
    """Medians over steps; `around` in per cent."""
    parts = {part: [record[clock][part] for record in records] for part in PARTS}
    totals = [sum(record[clock].values()) for record in records]
    around = [1.0 - sum(record[clock][part] for part in NETWORK) / sum(record[clock].values()) for record in records]
    return {
        **{part: 1e3 * statistics.median(values) for part, values in parts.items()},
        "step": 1e3 * statistics.median(totals),
        "around": 100 * statistics.median(around),
        "event loop": 1e3 * statistics.median(record.get("loop", 0.0) for record in records),
    }


def splits(records: Sequence[Record], kinds: Sequence[str]) -> dict[str, dict[int, dict[str, Split]]]:
    """Kind -> requests -> clock -> split. Raises BenchmarkError where no step of that many requests was seen."""
    result: dict[str, dict[int, dict[str, Split]]] = {}
    for kind in kinds:
        for requests in REQUESTS:
            some = [record for record in records if (record["kind"], record["requests"]) == (kind, requests)]
            if not some:
                raise BenchmarkError(f"no step of {requests} {kind} requests was seen")
            result.setdefault(kind, {})[requests] = {clock: split(some, clock) for clock in ("wall", "cpu")}
    return result


def table(seen: Mapping[int, Mapping[str, Split]]) -> str:
    """Markdown: a row a part, a column a number of requests: wall time, and the engine thread's own in brackets."""
    rows = ["| milliseconds | " + " | ".join(f"{requests} at once" for requests in seen) + " |"]
    rows.append("|---|" + "---:|" * len(seen))
    for part in (*PARTS, "step", "around"):
        unit = " %" if part == "around" else ""
        cells = [f"{clocks['wall'][part]:.2f} ({clocks['cpu'][part]:.2f}){unit}" for clocks in seen.values()]
        rows.append(f"| {part} | " + " | ".join(cells) + " |")
    rows.append(
        "| event loop | " + " | ".join(f"{clocks['wall']['event loop']:.2f}" for clocks in seen.values()) + " |"
    )
    return "\n".join(rows)


@contextlib.contextmanager
def watched(records: Path, stand_in: float | None, arguments: Sequence[str]) -> Any:
    port = free_port()
    replaced = [] if stand_in is None else ["--stand-in", str(stand_in)]
    command = [sys.executable, "-m", "benchmarks.stopwatch", str(records), *replaced, "serve", *arguments]
    with running([*command, "--host", "127.0.0.1", "--port", str(port)], port) as base:
        yield base


@click.command(help=__doc__)
@click.option("--serve-args", default="", help="Arguments of `pagekv serve`.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="How tokens are chosen, comma-separated.")
@click.option("--tokens", default=96, show_default=True, type=click.IntRange(min=8), help="Decoded by each request.")
@click.option("--stand-in", type=click.FloatRange(min=0), help="A network that sleeps so many milliseconds instead.")
@click.option("--seed", default=0, show_default=True, help="Seed of the prompts.")
def main(serve_args: str, kinds: str, tokens: int, stand_in: float | None, seed: int) -> None:
    arguments = shlex.split(serve_args)
    chosen = kinds.split(",")
    for kind in chosen:
        if kind not in KINDS:
            raise click.BadParameter(f"no kind {kind!r}; there are {', '.join(KINDS)}")
    try:
        with tempfile.TemporaryDirectory(prefix="pagekv-steps-") as folder:
            records = Path(folder, "records.json")
            with watched(records, stand_in, arguments) as base:
                model = asyncio.run(decode(base, chosen, tokens, seed))
            seen = splits(json.loads(records.read_text(encoding="utf-8")), chosen)
    except (BenchmarkError, httpx.HTTPError) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    machine = report.hardware()
    network = "" if stand_in is None else f"; a stand-in of {stand_in:g} ms for the network"
    command = " ".join(["pagekv serve", *arguments])
    print(f"\n{model} on {report.describe(machine)}; {command}{network}; medians, seed {seed}.")
    for kind, by_requests in seen.items():
        print(f"\n{kind}\n\n{table(by_requests)}")
    about = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "serve_args": arguments,
        "stand_in_ms": stand_in,
        "tokens": tokens,
        "seed": seed,
        "hardware": machine,
    }
    print("\n" + json.dumps({"benchmark": "steps", **about, "results": seen}))


if __name__ == "__main__":
    main()
