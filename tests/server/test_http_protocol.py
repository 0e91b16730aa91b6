"""Connections as the field has them: endless heads, silence, HTTP/1.0, half-closed sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from scheduler.messages import FinishReason
from server.http_protocol import CONTINUE, MAX_HEAD, HttpProtocol
from tests.server.harness import Running, serve, until

BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
STREAM = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve() as running:
        yield running


def connect(server: Running) -> socket.socket:
    address = httpx.URL(server.url)
    return socket.create_connection((address.host, address.port or 80), timeout=10)


def request(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def everything(raw: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def until_healthy(raw: socket.socket) -> bytes:
    """The answer of /health on a connection that stays open."""
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += raw.recv(65536)
    return answer


def error_of(answer: bytes, status: int) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"connection: close" in head
    error: dict[str, object] = json.loads(body)["error"]
    return error


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begin", [b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"GET /", b"GET /health HTTP/1.1\r\na: b\r\n"]
)
def test_a_head_without_end_is_refused(server: Running, begin: bytes) -> None:
    piece = b"y: z\r\n" * 1000 if begin.endswith(b"\n") else b"y" * 6000
    with connect(server) as raw:
        raw.sendall(begin)
        sent = len(begin)
        while sent < MAX_HEAD:
            raw.sendall(piece)
            sent += len(piece)
        assert error_of(everything(raw), 431)["code"] == "request_head_too_large"
    assert httpx.get(server.url + "/health").status_code == 200


def test_trailers_without_end_are_refused(server: Running) -> None:
    """They come after the body, in a request that has begun: its connection is closed."""
    with connect(server) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        raw.sendall(b"transfer-encoding: chunked\r\n\r\n5\r\n{    \r\n0\r\n")
        with pytest.raises((ConnectionError, AssertionError)):
            for _ in range(200):
                raw.sendall(b"t: " + b"y" * 6000 + b"\r\n")
                time.sleep(0.001)
            raise AssertionError(everything(raw))


def test_a_head_just_within_the_limit(server: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: "
    head += b"y" * (MAX_HEAD - len(head) - 5) + b"\r\n\r\n"
    for text, status in ((head, 200), (head.replace(b"y", b"yyy", 1), 431)):
        with connect(server) as raw:
            raw.sendall(text)
            assert everything(raw).startswith(f"HTTP/1.1 {status} ".encode())


def test_an_endless_head_costs_little(server: Running) -> None:
    """200 MB were read to the end once, in quadratic time; now the server stops reading."""
    began = time.process_time()
    with connect(server) as raw, pytest.raises(ConnectionError):
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(200):
            raw.sendall(b"y" * 1_000_000)
    assert time.process_time() - began < 2


def test_a_large_body_is_no_head(server: Running) -> None:
    response = httpx.post(server.url + "/v1/completions", json={"prompt": [1] * MAX_HEAD, "max_tokens": 1})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_many_requests_on_one_connection(server: Running) -> None:
    """The bound is on each head, not on all of a connection's."""
    with connect(server) as raw:
        for _ in range(8):
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n")
            assert until_healthy(raw).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_gets_an_error_in_shape(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(b"hello\r\n\r\n")
        assert error_of(everything(raw), 400)["code"] == "invalid_http"


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "head_timeout", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_head_that_does_not_arrive(server: Running, first: bytes) -> None:
    with connect(server) as raw:
        if first:
            raw.sendall(first)
            assert until_healthy(raw).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)  # between requests a connection may be silent for longer
        raw.sendall(b"GET /health HTTP/1.1\r\nhos")
        assert error_of(everything(raw), 408)["code"] == "request_timeout"


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_sends_nothing_is_closed(server: Running) -> None:
    with connect(server) as raw:
        assert everything(raw) == b""


@pytest.mark.usefixtures("impatient")
def test_an_answer_may_take_longer_than_a_head(server: Running) -> None:
    with serve(interval=0.2) as slow, connect(slow) as raw:
        raw.sendall(request(BODY, "connection: close"))
        assert everything(raw).startswith(b"HTTP/1.1 200 ")


# -- HTTP/1.0 ---------------------------------------------------------------------------------------------------------


def test_a_stream_to_http_1_0_has_no_chunks(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(request(STREAM, version="1.0"))
        head, _, body = everything(raw).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    lines = [line for line in body.decode().split("\n") if line]
    assert all(line.startswith(("data: ", ":")) for line in lines) and lines[-1] == "data: [DONE]"


def test_a_whole_answer_to_http_1_0(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(request(BODY, version="1.0"))
        head, _, body = everything(raw).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower() and json.loads(body)["choices"]


# -- half-closed sockets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("interval", [0.0, 0.2])
def test_a_client_that_closes_its_sending_half_gets_its_answer(body: bytes, version: str, interval: float) -> None:
    with serve(interval=interval) as server, connect(server) as raw:
        raw.sendall(request(body, version=version))
        raw.shutdown(socket.SHUT_WR)
        answer = everything(raw)
        while answer.startswith(CONTINUE):
            answer = answer.removeprefix(CONTINUE)
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"finish_reason":"length"' in answer
        assert [reason for _, reason in server.engine.terminal] == [FinishReason.LENGTH]


def test_a_client_that_is_gone_is_noticed_all_the_same() -> None:
    endless = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True}).encode()
    with serve(script=lambda _: [65], interval=0.02) as server:
        with connect(server) as raw:
            raw.sendall(request(endless))
            until(lambda: server.engine.num_running == 1)
        until(lambda: server.engine.num_running == 0, seconds=3)
        assert [reason for _, reason in server.engine.terminal] == [FinishReason.ABORT]


def test_half_a_request_and_then_the_end(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(request(BODY)[:-4])
        raw.shutdown(socket.SHUT_WR)
        assert everything(raw) == b""
