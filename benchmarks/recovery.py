"""Measures what lost blocks cost:  python -m benchmarks.recovery

Two servers run side by side, one with `--recovery repair`, one with `--recovery truncate`, and are asked in turn. Both
have the same prompt cached, lose the same blocks of it, drawn at random, and get it again: how many tokens do they
compute, and after what time comes the first one? Every prompt and every draw comes from a fixed seed; numbers are
medians of --repeats. The last line printed is one JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import report
from benchmarks.cases import BLOCK_SIZE, LONG, Bench, Sample, lose_and_ask, lost_blocks, random_prompt, warm_up
from benchmarks.client import BenchmarkError, complete, served_model
from benchmarks.launch import running_server

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "block-loss.svg"
POLICIES = ("repair", "truncate")
SHARES = (0, 1, 5, 10, 25, 50)  # per cent of the prompt's blocks


@dataclass(slots=True)
class Point:
    """What one policy did after one share of the blocks was lost, a value per repetition."""

    computed: list[int] = field(default_factory=list)  # tokens of the prompt
    ttft: list[float] = field(default_factory=list)  # milliseconds

    def samples(self) -> dict[str, Sample]:
        return {"computed": Sample("tokens", tuple(map(float, self.computed))), "ttft": Sample("ms", tuple(self.ttft))}


Curve = dict[str, dict[int, Point]]
"""Policy -> share lost in per cent -> what was seen."""


class Server:
    """One of the two servers: a connection, and the name of what it serves."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def fill(self, prompt: Sequence[int]) -> None:
        await complete(self._client, self._model, prompt, 1)

    async def lose_and_ask(self, prompt: Sequence[int], lost: Sequence[int], point: Point) -> None:
        """Lose these blocks of a cached prompt, send it again, and add what that took to `point`."""
        answer = await lose_and_ask(self._client, self._model, prompt, lost)
        point.computed.append(len(prompt) - answer.cached_tokens)
        point.ttft.append(answer.ttft_ms)


async def connect(stack: contextlib.AsyncExitStack, base: str) -> tuple[Server, str]:
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=600))
    model = await served_model(client)
    if model.max_model_len is not None and model.max_model_len <= LONG:
        raise BenchmarkError(f"prompts of {LONG} tokens do not fit in max_model_len {model.max_model_len}")
    await warm_up(Bench(client, model.id, random.Random("warm up")))
    return Server(client, model.id), model.id


async def measure(bases: Mapping[str, str], seed: int, repeats: int) -> tuple[str, Curve]:
    """The curve, and the model's name. `bases` are the servers' URLs by policy."""
    rng = random.Random(seed)
    curve: Curve = {policy: {share: Point() for share in SHARES} for policy in bases}
    async with contextlib.AsyncExitStack() as stack:
        connected = {policy: await connect(stack, base) for policy, base in bases.items()}
        servers = {policy: server for policy, (server, _) in connected.items()}
        model = next(iter(connected.values()))[1]
        for repeat in range(repeats):
            prompt = random_prompt(rng, LONG)
            for server in servers.values():
                await server.fill(prompt)
            for share in rng.sample(SHARES, len(SHARES)):
                lost = lost_blocks(rng, share, LONG // BLOCK_SIZE)
                # The order changes from one repetition to the next, so that a busy moment is not always the same one's.
                for policy in POLICIES[:: 1 if repeat % 2 else -1]:
                    await servers[policy].lose_and_ask(prompt, lost, curve[policy][share])
                print(f"{repeat + 1}/{repeats}: {share:2d} % lost  {told(curve, share)}", flush=True)
    return model, curve


def told(curve: Curve, share: int) -> str:
    """The last repetition in words."""
    points = ((policy, curve[policy][share]) for policy in POLICIES)
    return ", ".join(f"{policy} {p.computed[-1]} tokens in {p.ttft[-1] / 1e3:.2f} s" for policy, p in points)


def table(curve: Curve) -> str:
    """Markdown: one row a share; medians, with the range of the times."""
    columns = " | ".join(f"{policy}: tokens computed | time to first token" for policy in POLICIES)
    rows = [f"| blocks lost | {columns} |"]
    rows.append("|---|" + "---:|---:|" * len(POLICIES))
    for share in SHARES:
        cells = [f"{share} %"]
        for policy in POLICIES:
            computed, ttft = curve[policy][share].samples().values()
            cells.append(f"{computed.median:.0f}")
            cells.append(f"{seconds(ttft.median)} s ({seconds(min(ttft.values))} to {seconds(max(ttft.values))})")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f}"


def document(curve: Curve, about: Mapping[str, Any]) -> str:
    """One line of JSON: what was run and where, then per policy and share the quantities."""
    results = {
        policy: {str(share): report.samples_json(point.samples()) for share, point in points.items()}
        for policy, points in curve.items()
    }
    return json.dumps({"benchmark": "recovery", **about, "results": results})


@contextlib.contextmanager
def both_servers(arguments: Sequence[str]) -> Iterator[dict[str, str]]:
    """The two servers' URLs, by policy."""
    with contextlib.ExitStack() as stack:
        yield {
            policy: stack.enter_context(
                running_server([*arguments, "--recovery", policy, "--block-size", str(BLOCK_SIZE)])
            )
            for policy in POLICIES
        }


@click.command(help=__doc__)
@click.option("--serve-args", default="--kv-memory 1GiB", show_default=True, help="Arguments of `pagekv serve`.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Prompts measured.")
@click.option("--seed", default=0, show_default=True, help="Seed of the prompts and of the blocks lost.")
@click.option("--write-readme", is_flag=True, help="Put table and picture into README.md and docs/.")
def main(serve_args: str, repeats: int, seed: int, write_readme: bool) -> None:
    arguments = shlex.split(serve_args)
    try:
        with both_servers(arguments) as bases:
            model, curve = asyncio.run(measure(bases, seed, repeats))
    except (BenchmarkError, httpx.HTTPError) as error:
        raise click.ClickException(str(error)) from error

    machine = report.hardware()
    about: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "serve_args": arguments,
        "prompt_tokens": LONG,
        "block_size": BLOCK_SIZE,
        "seed": seed,
        "repeats": repeats,
        "hardware": machine,
    }
    heading = (
        f"{model} on {report.describe(machine)}; {' '.join(['pagekv serve', *arguments])}; prompts of {LONG} tokens, "
        f"{LONG // BLOCK_SIZE} blocks; medians of {repeats}, seed {seed}."
    )
    print(f"\n{heading}\n\n{table(curve)}\n")
    if write_readme:
        from benchmarks.picture import draw

        draw(PICTURE, {policy: {s: p.samples() for s, p in points.items()} for policy, points in curve.items()}, LONG)
        report.put_between_markers(ROOT / "README.md", f"{heading}\n\n{table(curve)}", "block-loss")
    print(document(curve, about))


if __name__ == "__main__":
    main()
