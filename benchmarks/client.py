"""A streaming client of `/v1/completions` that keeps the clock: what a user of the server would see, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx


class BenchmarkError(Exception):
    """The server answered something that makes the measurement meaningless; the message says what."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it. Instants are seconds of the monotonic clock."""

    sent: float
    first: float  # the first token's arrival
    last: float  # the last token's
    completion_tokens: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        """Time to first token, milliseconds."""
        return (self.first - self.sent) * 1e3

    @property
    def ms_per_token(self) -> float:
        """Mean time between tokens after the first, milliseconds."""
        return (self.last - self.first) * 1e3 / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Model:
    """What `/v1/models` says of the model being served."""

    id: str
    max_model_len: int | None


async def served_model(client: httpx.AsyncClient) -> Model:
    response = await client.get("/v1/models")
    response.raise_for_status()
    first = response.json()["data"][0]
    return Model(first["id"], first.get("max_model_len"))


async def drop_blocks(client: httpx.AsyncClient, model: str, prompt: Sequence[int], blocks: Sequence[int]) -> int:
    """Has the server give up the K/V of these blocks of a prompt; returns how many it gave up."""
    body = {"model": model, "prompt": list(prompt), "blocks": list(blocks)}
    response = await client.post("/v1/cache/drop", json=body)
    if response.status_code != 200:
        raise BenchmarkError(f"{response.status_code}: {response.content[:500]!r}")
    return int(response.json()["blocks"])


async def complete(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, **fields: object
) -> Answer:
    """Sends token ids, greedy unless `fields` say otherwise, deaf to end-of-sequence: every run does the same work.

    The first token has arrived when a chunk carries text or ends the choice: an empty opening chunk is no token.
    Raises BenchmarkError when the server refuses, fails midway or sends no usage.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    sent = time.perf_counter()
    arrivals: list[float] = []
    usage = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchmarkError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise BenchmarkError(f"error within the stream: {event['error']}")
            usage = event.get("usage") or usage
            if any(choice["text"] or choice.get("finish_reason") for choice in event["choices"]):
                arrivals.append(now)
    if usage is None or not arrivals:
        raise BenchmarkError("the stream ended without a token or without usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(sent, arrivals[0], arrivals[-1], usage["completion_tokens"], details.get("cached_tokens") or 0)
