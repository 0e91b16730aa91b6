"""Asks the cases of one server or of several in turn, so that a busy moment of the machine hits all of them alike."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import httpx

from benchmarks.cases import CASES, LONG, Bench, Case, Reading, Result, samples, warm_up
from benchmarks.client import BenchmarkError, Model, served_model
from benchmarks.report import digits

Results = dict[Case, Result]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is measured; `truncating` is the URL of the one that lost blocks are compared with."""

    base: str
    ours: bool = True
    truncating: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`pause`: seconds between two servers, for compute threads of the last one that spin before they sleep."""

    cases: Sequence[Case]
    seed: int
    repeats: int
    pause: float = 0.0


def chosen_cases(wanted: str) -> list[Case]:
    """Cases whose name is, or begins with, one of the comma-separated words; all of them for an empty string."""
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    for word in words:
        if not any(case.name.startswith(word) for case in CASES):
            raise click.BadParameter(f"no case {word!r}; there are {', '.join(case.name for case in CASES)}")
    names = [case.name for case in CASES]
    exact = [word for word in words if word in names]
    begun = tuple(word for word in words if word not in names)
    return [case for case in CASES if not words or case.name in exact or (begun and case.name.startswith(begun))]


@dataclass(frozen=True, slots=True)
class _Connection:
    client: httpx.AsyncClient
    model: Model
    ours: bool
    truncating: httpx.AsyncClient | None

    def bench(self, seed: str) -> Bench:
        return Bench(self.client, self.model.id, random.Random(seed), self.truncating)


async def _connect(stack: contextlib.AsyncExitStack, target: Target) -> _Connection:
    limits = httpx.Limits(max_connections=64)

    async def client(base: str) -> httpx.AsyncClient:
        return await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=600, limits=limits))

    to_server = await client(target.base)
    model = await served_model(to_server)
    if model.max_model_len is not None and model.max_model_len <= LONG:
        raise BenchmarkError(f"prompts of {LONG} tokens do not fit in max_model_len {model.max_model_len}")
    truncating = await client(target.truncating) if target.truncating else None
    connection = _Connection(to_server, model, target.ours, truncating)
    await warm_up(connection.bench("warm up"))
    if truncating is not None:
        await warm_up(Bench(truncating, model.id, random.Random("warm up")))
    return connection


async def measure(targets: Mapping[str, Target], plan: Plan) -> tuple[dict[str, str], dict[str, Results]]:
    """Name of a server -> its model's name, and -> its results. Prints each case's medians as they come.

    All servers get the same prompts. Which of them is asked first changes from one repetition to the next.
    """
    results: dict[str, Results] = {name: {} for name in targets}
    async with contextlib.AsyncExitStack() as stack:
        connections = {name: await _connect(stack, target) for name, target in targets.items()}
        for case in plan.cases:
            asked = [name for name, connection in connections.items() if connection.ours or not case.ours]
            readings: dict[str, list[Reading]] = {name: [] for name in asked}
            for repeat in range(plan.repeats):
                for name in asked[:: 1 if repeat % 2 == 0 else -1]:
                    await asyncio.sleep(plan.pause)
                    bench = connections[name].bench(f"{plan.seed} {case.name} {repeat}")
                    readings[name].append(await case.once(bench))
            for name in asked:
                results[name][case] = samples(readings[name])
            print(told(case, {name: results[name][case] for name in asked}), flush=True)
        return {name: connection.model.id for name, connection in connections.items()}, results


def told(case: Case, results: Mapping[str, Result]) -> str:
    """One line: the medians of each server."""
    parts = []
    for name, result in results.items():
        values = ", ".join(f"{quantity} {digits(sample.median)} {sample.unit}" for quantity, sample in result.items())
        parts.append(f"{name}: {values}" if len(results) > 1 else values)
    return f"{case.name:12s} " + "; ".join(parts)
