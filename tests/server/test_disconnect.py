"""Clients that leave: their requests are aborted at once, wherever they were."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from scheduler.messages import FinishReason
from tests.server.harness import Running, serve, until

ENDLESS = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[Running]:
    with serve(script=lambda _: [65], interval=0.02) as running:
        yield running


def send(server: Running, body: dict[str, object]) -> socket.socket:
    content = json.dumps(body).encode()
    address = httpx.URL(server.url)
    raw = socket.create_connection((address.host, address.port or 80), timeout=10)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    raw.sendall(head.format(len(content)).encode() + content)
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts_the_request(server: Running, stream: bool) -> None:
    with send(server, {**ENDLESS, "stream": stream}):
        until(lambda: server.engine.num_running == 1)
    until(lambda: server.engine.num_running == 0)
    assert [reason for _, reason in server.engine.terminal] == [FinishReason.ABORT]
    until(lambda: server.bridge.num_live == 0)


def test_leaving_within_a_stream(server: Running) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json={**ENDLESS, "stream": True}) as response:
        next(response.iter_lines())
    until(lambda: server.engine.num_running == 0)
    assert [reason for _, reason in server.engine.terminal] == [FinishReason.ABORT]


def test_leaving_aborts_every_prompt_of_the_body(server: Running) -> None:
    with send(server, {**ENDLESS, "prompt": ["a", "b", "c"], "stream": True}):
        until(lambda: server.engine.num_running == 3)
    until(lambda: server.engine.num_running == 0)
    assert len(server.engine.terminal) == 3


def test_two_hundred_clients_leave(server: Running) -> None:
    """Half of them stream, half wait; all are cut off. Then a normal request is answered."""

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        body = {**ENDLESS, "stream": number % 2 == 0}
        async with client.stream("POST", server.url + "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                return

    async def visit_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            visits = [asyncio.create_task(visit(client, number)) for number in range(200)]
            async with asyncio.timeout(60):
                while len(server.engine.submitted) < 200:
                    await asyncio.sleep(0.05)
            for each in visits:
                each.cancel()
            await asyncio.gather(*visits, return_exceptions=True)

    asyncio.run(visit_all())
    until(lambda: server.engine.num_running == 0 and server.bridge.num_live == 0)
    submitted = [request.request_id for request in server.engine.submitted]
    assert len(submitted) == 200
    assert sorted(request_id for request_id, _ in server.engine.terminal) == sorted(submitted)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).json()["choices"][0]["text"] == "AA"


def test_a_reader_that_stops_reading_holds_back_only_itself() -> None:
    """Its stream waits, its tokens pile up as ids alone, and another client is served all the while."""
    body = {**ENDLESS, "prompt": ["x"] * 32, "logprobs": 20, "stream": True}  # some 20 MB, more than sockets hold
    with serve(script=lambda _: [65]) as server, send(server, body) as slow:
        for _ in range(3):
            answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).json()
            assert answer["choices"][0]["text"] == "AAAAA"
        got = b""
        while b"[DONE]" not in got[-100:]:
            got += slow.recv(65536)
    assert got.count(b'"finish_reason":"length"') == 32
