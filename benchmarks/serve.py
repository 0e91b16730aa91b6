"""Measures the server over HTTP, as its users see it:  python -m benchmarks.serve  (or `make bench`).

A server is started for the run unless --base names one that is there already. Random prompts of token ids come from a
fixed seed; every number is a median of --repeats. The last line printed is one JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import shlex
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import report
from benchmarks.cases import CASES, LONG, Bench, Case, Result, warm_up
from benchmarks.client import BenchmarkError, Model, served_model
from benchmarks.launch import running_server

README = Path(__file__).resolve().parent.parent / "README.md"


async def measure(base: str, cases: list[Case], seed: int, repeats: int) -> tuple[Model, dict[Case, Result]]:
    """Runs the cases one after the other against the server at `base`, printing each median as it comes."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits) as client:
        model = await served_model(client)
        if model.max_model_len is not None and model.max_model_len <= LONG:
            raise BenchmarkError(f"prompts of {LONG} tokens do not fit in max_model_len {model.max_model_len}")
        bench = Bench(client, model.id, random.Random(seed), repeats)
        await warm_up(bench)
        results: dict[Case, Result] = {}
        for case in cases:
            results[case] = await case.run(bench)
            told = ", ".join(
                f"{name} {report.digits(sample.median)} {sample.unit}" for name, sample in results[case].items()
            )
            print(f"{case.name:12s} {told}", flush=True)
        return model, results


def chosen_cases(wanted: str) -> list[Case]:
    """Cases whose name is, or begins with, one of the comma-separated words; all of them for an empty string."""
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    for word in words:
        if not any(case.name.startswith(word) for case in CASES):
            raise click.BadParameter(f"no case {word!r}; there are {', '.join(case.name for case in CASES)}")
    return [case for case in CASES if not words or case.name.startswith(tuple(words))]


@click.command(help=__doc__)
@click.option("--base", help="URL of a running server, such as http://127.0.0.1:8000; the default starts one.")
@click.option("--serve-args", default="", help="Arguments of `pagekv serve` for the server that is started.")
@click.option("--cases", default="", help="Comma-separated beginnings of case names; the default is all.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Repetitions of a case.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
@click.option("--write-readme", is_flag=True, help="Put the table between the markers of README.md.")
def main(base: str | None, serve_args: str, cases: str, repeats: int, seed: int, write_readme: bool) -> None:
    wanted = chosen_cases(cases)
    arguments = shlex.split(serve_args)
    try:
        with contextlib.nullcontext(base) if base else running_server(arguments) as url:
            model, results = asyncio.run(measure(url, wanted, seed, repeats))
    except (BenchmarkError, httpx.HTTPError) as error:
        raise click.ClickException(str(error)) from error

    machine = report.hardware()
    about: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.id,
        "serve_args": arguments if base is None else None,
        "seed": seed,
        "repeats": repeats,
        "hardware": machine,
    }
    command = " ".join(["pagekv serve", *arguments]) if base is None else f"a server at {base}"
    heading = f"{model.id} on {report.describe(machine)}; {command}; medians of {repeats}, seed {seed}."
    table = report.table(results)
    print(f"\n{heading}\n\n{table}\n")
    if write_readme:
        report.put_between_markers(README, f"{heading}\n\n{table}", "benchmark")
    print(report.document(results, about))


if __name__ == "__main__":
    main()
