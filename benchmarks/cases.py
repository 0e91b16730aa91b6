"""What is measured. Each case is one question about a server; asking it once gives a reading.

Every prompt is random token ids, new for each reading. Who asks a case twice with an equal `Bench.rng` asks the same
prompts, which is how two servers are compared. A case's first quantity is what it is about; less of it is better.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.client import Answer, BenchmarkError, complete, drop_blocks

# Plain vocabulary of every model served so far: special tokens lie below or above.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40000
LONG = 2048  # tokens in the long prompt
TAIL = 16  # new tokens at the end of a prompt that is cached but for them
EDITED = 39  # position of its 40th token
DECODE_PROMPT, DECODE_TOKENS = 32, 128
LOAD_REQUESTS, LOAD_AT_ONCE, LOAD_SHARED, LOAD_OWN, LOAD_TOKENS = 32, 8, 1024, 64, 64
BLOCK_SIZE = 16  # tokens; of our servers, where blocks are dropped
LOST_PER_CENT = 5


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


Reading = dict[str, float]
"""Quantity -> what asking a case once gave."""

Result = dict[str, Sample]
"""Quantity -> its sample. The first quantity is the one the case is about."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The connection, the model's name and the source of prompts.

    `truncating` is a second server of ours, with `--recovery truncate`, that the case of lost blocks compares with.
    """

    client: httpx.AsyncClient
    model: str
    rng: random.Random
    truncating: httpx.AsyncClient | None = None

    def prompt(self, tokens: int) -> list[int]:
        return random_prompt(self.rng, tokens)

    async def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        return await complete(self.client, self.model, prompt, max_tokens)


async def warm_up(bench: Bench) -> None:
    """Lets the server touch its memory and its kernels before anything counts."""
    for tokens in (DECODE_PROMPT, 300, LONG):
        await bench.ask(bench.prompt(tokens), 8)
    await asyncio.gather(*(bench.ask(bench.prompt(DECODE_PROMPT), 8) for _ in range(8)))


def first_token(answer: Answer) -> Reading:
    return {"ttft": answer.ttft_ms, "cached": float(answer.cached_tokens)}


def cold(tokens: int) -> Callable[[Bench], Awaitable[Reading]]:
    async def once(bench: Bench) -> Reading:
        answer = await bench.ask(bench.prompt(tokens))
        # One token in common at the start is chance; a block is a prompt seen before.
        if answer.cached_tokens >= tokens // 2:
            raise BenchmarkError("a cold prompt was found in the cache: give a server that ran before another --seed")
        return first_token(answer)

    return once


async def warm(bench: Bench) -> Reading:
    prompt = bench.prompt(LONG)
    await bench.ask(prompt)
    return first_token(await bench.ask(prompt))


async def tail(bench: Bench) -> Reading:
    prompt = bench.prompt(LONG)
    await bench.ask(prompt)
    return first_token(await bench.ask([*prompt[:-TAIL], *bench.prompt(TAIL)]))


async def edited(bench: Bench) -> Reading:
    prompt = bench.prompt(LONG)
    await bench.ask(prompt)
    other = FIRST_TOKEN_ID if prompt[EDITED] != FIRST_TOKEN_ID else LAST_TOKEN_ID
    return first_token(await bench.ask([*prompt[:EDITED], other, *prompt[EDITED + 1 :]]))


def decode(requests: int) -> Callable[[Bench], Awaitable[Reading]]:
    """`requests` with prompts of their own, decoding at the same time."""

    async def once(bench: Bench) -> Reading:
        prompts = [bench.prompt(DECODE_PROMPT) for _ in range(requests)]
        answers = await asyncio.gather(*(bench.ask(prompt, DECODE_TOKENS) for prompt in prompts))
        seconds = max(answer.last for answer in answers) - min(answer.first for answer in answers)
        return {
            "per token": statistics.median(answer.ms_per_token for answer in answers),
            "rate": sum(answer.completion_tokens - 1 for answer in answers) / seconds,
        }

    return once


async def load(bench: Bench) -> Reading:
    """Many users of one system prompt: the requests share their beginning, and a few run at a time."""
    shared = bench.prompt(LOAD_SHARED)
    prompts = [[*shared, *bench.prompt(LOAD_OWN)] for _ in range(LOAD_REQUESTS)]
    gate = asyncio.Semaphore(LOAD_AT_ONCE)

    async def one(prompt: Sequence[int]) -> Answer:
        async with gate:
            return await bench.ask(prompt, LOAD_TOKENS)

    begin = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - begin
    return {
        "total": seconds,
        "rate": sum(answer.completion_tokens for answer in answers) / seconds,
        "mean ttft": statistics.fmean(answer.ttft_ms for answer in answers),
        "cached": statistics.median(answer.cached_tokens for answer in answers),
    }


def lost_blocks(rng: random.Random, share: int, blocks: int) -> list[int]:
    """Indices of `share` per cent of a prompt's blocks, drawn without replacement, ascending."""
    return sorted(rng.sample(range(blocks), round(blocks * share / 100)))


async def lose_and_ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], lost: Sequence[int]) -> Answer:
    """Drop blocks of a cached prompt and send it again; afterwards all of it is cached again.

    Raises BenchmarkError if the server had not as many blocks to lose.
    """
    if lost and (dropped := await drop_blocks(client, model, prompt, lost)) != len(lost):
        raise BenchmarkError(f"{len(lost)} blocks were to be dropped, and {dropped} were")
    return await complete(client, model, prompt, 1)


async def lost(bench: Bench) -> Reading:
    """A cached prompt loses some of its blocks; both servers, if there are two, in random order."""
    prompt = bench.prompt(LONG)
    blocks = lost_blocks(bench.rng, LOST_PER_CENT, LONG // BLOCK_SIZE)
    clients = [bench.client, *([bench.truncating] if bench.truncating else [])]
    answers = {}
    for client in bench.rng.sample(clients, len(clients)):
        await complete(client, bench.model, prompt, 1)
        answers[client] = await lose_and_ask(client, bench.model, prompt, blocks)
    repaired = answers[bench.client]
    reading = {"ttft": repaired.ttft_ms, "computed": float(LONG - repaired.cached_tokens)}
    if bench.truncating:
        truncated = answers[bench.truncating].ttft_ms
        reading |= {"truncate": truncated, "ratio": repaired.ttft_ms / truncated}
    return reading


UNITS = {
    "ttft": "ms",
    "cached": "tokens",
    "computed": "tokens",
    "per token": "ms",
    "rate": "tokens/s",
    "total": "s",
    "mean ttft": "ms",
    "truncate": "ms",
    "ratio": "of truncate",
}


def samples(readings: Sequence[Reading]) -> Result:
    """The readings of a case, quantity by quantity."""
    return {name: Sample(UNITS[name], tuple(reading[name] for reading in readings)) for name in readings[0]}


@dataclass(frozen=True, slots=True)
class Case:
    """`ours` alone: it asks for what only this project's server does."""

    name: str
    title: str
    once: Callable[[Bench], Awaitable[Reading]]
    ours: bool = False


CASES = (
    Case("cold-128", "time to first token, cold, 128 tokens", cold(128)),
    Case("cold-512", "time to first token, cold, 512 tokens", cold(512)),
    Case("cold-2048", "time to first token, cold, 2048 tokens", cold(LONG)),
    Case("warm-2048", "time to first token, the same 2048 tokens again", warm),
    Case("tail-2048", "time to first token, 16 new tokens after 2032 cached ones", tail),
    Case("edited-2048", "time to first token, 2048 tokens whose 40th was edited", edited),
    Case("decode-1", "decode, 1 request, time per token", decode(1)),
    Case("decode-4", "decode, 4 requests at once, time per token", decode(4)),
    Case("decode-8", "decode, 8 requests at once, time per token", decode(8)),
    Case("decode-16", "decode, 16 requests at once, time per token", decode(16)),
    Case("load", "32 requests, 1024 shared + 64 own tokens in, 64 out, 8 at a time", load),
    Case("lost-5", "time to first token, 2048 tokens of which 5 % of the blocks were lost", lost, ours=True),
)
