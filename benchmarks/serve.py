"""Measures the server over HTTP, as its users see it:  python -m benchmarks.serve  (or `make bench`).

Two servers are started for the run, the second with `--recovery truncate` for the case of lost blocks alone, unless
--base names one that is there already. Random prompts of token ids come from a fixed seed; every number is a median of
--repeats. The last line printed is one JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import report
from benchmarks.cases import BLOCK_SIZE, Case
from benchmarks.client import BenchmarkError
from benchmarks.launch import running_server
from benchmarks.measure import Plan, Target, chosen_cases, measure

README = Path(__file__).resolve().parent.parent / "README.md"
# The second server serves one case; what is given last counts.
TRUNCATING = ("--recovery", "truncate", "--kv-memory", "1GiB")


@contextlib.contextmanager
def servers(arguments: Sequence[str], cases: Sequence[Case]) -> Iterator[Target]:
    """Our server, and the one it is compared with where a case asks for it."""
    arguments = ["--block-size", str(BLOCK_SIZE), *arguments]
    with contextlib.ExitStack() as stack:
        # The small one first: what the other one takes by default is a share of the memory that is left.
        truncating = None
        if any(case.ours for case in cases):
            truncating = stack.enter_context(running_server([*arguments, *TRUNCATING]))
        yield Target(stack.enter_context(running_server(arguments)), truncating=truncating)


@click.command(help=__doc__)
@click.option("--base", help="URL of a running server, such as http://127.0.0.1:8000; the default starts one.")
@click.option("--truncating-base", help="With --base: URL of a second one, run with --recovery truncate.")
@click.option("--serve-args", default="", help="Arguments of `pagekv serve` for the server that is started.")
@click.option("--cases", default="", help="Comma-separated beginnings of case names; the default is all.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Repetitions of a case.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
@click.option("--write-readme", is_flag=True, help="Put the table between the markers of README.md.")
def main(
    base: str | None,
    truncating_base: str | None,
    serve_args: str,
    cases: str,
    repeats: int,
    seed: int,
    write_readme: bool,
) -> None:
    plan = Plan(chosen_cases(cases), seed, repeats)
    arguments = shlex.split(serve_args)
    started = contextlib.nullcontext(Target(base, truncating=truncating_base)) if base else None
    try:
        with started or servers(arguments, plan.cases) as target:
            models, results = asyncio.run(measure({"pagekv": target}, plan))
    except (BenchmarkError, httpx.HTTPError) as error:
        raise click.ClickException(str(error)) from error

    machine = report.hardware()
    model = models["pagekv"]
    about: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "serve_args": arguments if base is None else None,
        "seed": seed,
        "repeats": repeats,
        "hardware": machine,
    }
    command = " ".join(["pagekv serve", *arguments]) if base is None else f"a server at {base}"
    heading = f"{model} on {report.describe(machine)}; {command}; medians of {repeats}, seed {seed}."
    table = report.table(results["pagekv"])
    print(f"\n{heading}\n\n{table}\n")
    if write_readme:
        report.put_between_markers(README, f"{heading}\n\n{table}", "benchmark")
    print(report.document(results["pagekv"], about))


if __name__ == "__main__":
    main()
