"""What is measured. Each case is one question about the server, asked several times with fresh random prompts."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.client import Answer, BenchmarkError, complete

# Plain vocabulary of every model served so far: special tokens lie below or above.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40000
LONG = 2048  # tokens in the long prompt
EDITED = 39  # position of its 40th token
DECODE_PROMPT, DECODE_TOKENS = 32, 128


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of one quantity over the repetitions of a case."""

    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


Result = dict[str, Sample]
"""Quantity -> its sample. The first quantity is the one the case is about."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The connection, the model's name, the source of prompts and how often a case is repeated."""

    client: httpx.AsyncClient
    model: str
    rng: random.Random
    repeats: int

    def prompt(self, tokens: int) -> list[int]:
        return random_prompt(self.rng, tokens)

    async def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        return await complete(self.client, self.model, prompt, max_tokens)

    async def ask_together(self, count: int) -> list[Answer]:
        """`count` requests with prompts of their own, decoding at the same time."""
        return await asyncio.gather(*(self.ask(self.prompt(DECODE_PROMPT), DECODE_TOKENS) for _ in range(count)))


async def warm_up(bench: Bench) -> None:
    """Lets the server touch its memory and its kernels before anything counts."""
    for tokens in (DECODE_PROMPT, 300, LONG):
        await bench.ask(bench.prompt(tokens), 8)
    await asyncio.gather(*(bench.ask(bench.prompt(DECODE_PROMPT), 8) for _ in range(8)))


def first_token(answers: Sequence[Answer]) -> Result:
    return {
        "ttft": Sample("ms", tuple(answer.ttft_ms for answer in answers)),
        "cached": Sample("tokens", tuple(float(answer.cached_tokens) for answer in answers)),
    }


def cold(tokens: int) -> Callable[[Bench], Awaitable[Result]]:
    async def run(bench: Bench) -> Result:
        answers = [await bench.ask(bench.prompt(tokens)) for _ in range(bench.repeats)]
        # One token in common at the start is chance; a block is a prompt seen before.
        if max(answer.cached_tokens for answer in answers) >= tokens // 2:
            raise BenchmarkError("a cold prompt was found in the cache: give a server that ran before another --seed")
        return first_token(answers)

    return run


async def warm(bench: Bench) -> Result:
    answers = []
    for _ in range(bench.repeats):
        prompt = bench.prompt(LONG)
        await bench.ask(prompt)
        answers.append(await bench.ask(prompt))
    return first_token(answers)


async def edited(bench: Bench) -> Result:
    answers = []
    for _ in range(bench.repeats):
        prompt = bench.prompt(LONG)
        await bench.ask(prompt)
        other = FIRST_TOKEN_ID if prompt[EDITED] != FIRST_TOKEN_ID else LAST_TOKEN_ID
        answers.append(await bench.ask([*prompt[:EDITED], other, *prompt[EDITED + 1 :]]))
    return first_token(answers)


def decode(requests: int) -> Callable[[Bench], Awaitable[Result]]:
    async def run(bench: Bench) -> Result:
        rates, gaps = [], []
        for _ in range(bench.repeats):
            answers = await bench.ask_together(requests)
            seconds = max(answer.last for answer in answers) - min(answer.first for answer in answers)
            rates.append(sum(answer.completion_tokens - 1 for answer in answers) / seconds)
            gaps.append(statistics.median(answer.ms_per_token for answer in answers))
        return {"rate": Sample("tokens/s", tuple(rates)), "per token": Sample("ms", tuple(gaps))}

    return run


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    title: str
    run: Callable[[Bench], Awaitable[Result]]


CASES = (
    Case("cold-128", "time to first token, cold, 128 tokens", cold(128)),
    Case("cold-512", "time to first token, cold, 512 tokens", cold(512)),
    Case("cold-2048", "time to first token, cold, 2048 tokens", cold(LONG)),
    Case("warm-2048", "time to first token, the same 2048 tokens again", warm),
    Case("edited-2048", "time to first token, 2048 tokens whose 40th was edited", edited),
    Case("decode-1", "decode, 1 request", decode(1)),
    Case("decode-8", "decode, 8 requests at once", decode(8)),
)
