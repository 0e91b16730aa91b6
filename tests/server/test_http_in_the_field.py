"""What clients, browsers and proxies expect of any HTTP API: CORS, HEAD, names, headers that come at once, pings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scheduler.messages import FinishReason, RequestOutput, StepOutput
from server.state import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Running, serve, until

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    settings = ServerSettings("toy", aliases=("doll", "org/puppet"), cors_origins=("https://a.example",))
    with serve(settings) as running:
        yield running


def test_cors_is_off_unless_asked_for() -> None:
    with serve() as plain:
        got = httpx.get(plain.url + "/v1/models", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in got.headers


def test_cors(server: Running) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    allowed = httpx.options(server.url + "/v1/chat/completions", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    got = httpx.post(server.url + "/v1/chat/completions", json=CHAT, headers={"origin": "https://a.example"})
    assert got.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.get(server.url + "/v1/models", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/toy", "/version", "/metrics", "/load", "/docs"])
def test_head_wherever_get(server: Running, path: str) -> None:
    got, head = httpx.get(server.url + path), httpx.head(server.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(server.url + "/v1/completions").status_code == 405
    assert httpx.head(server.url + "/nothing").status_code == 404


@pytest.mark.parametrize("name", ["toy", "doll", "org/puppet", None])
def test_every_name_is_answered_and_the_first_is_told(server: Running, name: str | None) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        assert server.post(path, body | {"model": name}).json()["model"] == "toy"
    assert httpx.get(f"{server.url}/v1/models/{name or 'toy'}").json()["id"] == "toy"
    assert [each["id"] for each in httpx.get(server.url + "/v1/models").json()["data"]] == ["toy"]


def test_an_unknown_model_is_told_what_is_served(server: Running) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The model 'gpt-4' does not exist. Served here: toy."


# -- streams ----------------------------------------------------------------------------------------------------------


class Silent(FakeEngine):
    """It computes a long prompt: nothing comes of it for a second."""

    def _advance(self, running: Any) -> RequestOutput:
        if running.sent == 0:
            time.sleep(1.0)
        return super()._advance(running)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr("tests.server.harness.FakeEngine", Silent)
    with serve(ServerSettings("toy", sse_ping=0.2)) as running:
        yield running


BODIES: list[tuple[str, dict[str, Any], bytes]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 3}, b": ping\n\n"),
    ("/v1/chat/completions", CHAT, b": ping\n\n"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 3}, b": ping\n\n"),
    ("/v1/messages", CHAT | {"model": "toy"}, b'event: ping\ndata: {"type":"ping"}\n\n'),
]


@pytest.mark.parametrize(("path", "body", "ping"), BODIES)
def test_headers_come_at_once_and_pings_while_nothing_else_does(
    silent: Running, path: str, body: dict[str, Any], ping: bytes
) -> None:
    began = time.monotonic()
    with httpx.stream("POST", silent.url + path, json=body | {"stream": True}, timeout=20) as response:
        assert response.status_code == 200 and time.monotonic() - began < 0.9
        content = b"".join(response.iter_raw())
    assert content.startswith(ping) and content.count(ping) >= 2


def test_no_pings_where_tokens_come(server: Running) -> None:
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert b": ping" not in b"".join(response.iter_raw())


def test_a_client_that_leaves_before_the_first_token(silent: Running) -> None:
    with httpx.stream("POST", silent.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert response.status_code == 200
    until(lambda: bool(silent.engine.terminal))
    until(lambda: silent.bridge.num_live == 0)


class Failing(FakeEngine):
    """It fails a request at once, before anything is computed."""

    def submit(self, request: Any) -> None:
        super().submit(request)
        failed = RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error="no")
        self._deliver(StepOutput((failed,), self.stats))


def test_what_fails_at_once_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.server.harness.FakeEngine", Failing)
    with serve() as server:
        assert server.post("/v1/chat/completions", CHAT | {"stream": True}).status_code == 500


def test_what_fails_later_is_an_event(silent: Running) -> None:
    silent.engine.fail_at = lambda request: 0
    response = silent.post("/v1/chat/completions", CHAT | {"stream": True})
    assert response.status_code == 200
    events = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert events[-1] == "data: [DONE]"


# -- keys and ids -----------------------------------------------------------------------------------------------------


def test_keys_that_have_nothing_to_say_are_null(server: Running) -> None:
    chat = server.post("/v1/chat/completions", CHAT).json()
    text = server.post("/v1/completions", {"prompt": "x"}).json()
    for answer in (chat, text):
        assert [answer[key] for key in ("system_fingerprint", "service_tier", "kv_transfer_params")] == [None] * 3
        assert answer["choices"][0]["token_ids"] is None
    for holder in (chat, text["choices"][0]):
        assert holder["prompt_logprobs"] is None and holder["prompt_token_ids"] is None


def test_all_bad_keys_of_a_logit_bias_are_named(server: Running) -> None:
    error = server.post("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1, "5": 1, "99999": 2}}).json()["error"]
    assert error["param"] == "logit_bias" and "'a', '99999'" in error["message"]
    many = server.post("/v1/completions", {"prompt": "x", "logit_bias": {f"k{i}": 1 for i in range(1000)}})
    assert many.status_code == 400 and len(many.text) < 3000


def test_two_live_requests_of_one_id_are_both_answered() -> None:
    with serve(script=lambda _: [65], interval=0.002) as server:
        body = {"prompt": "x", "max_tokens": 300, "request_id": "mine"}
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=20) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-mine"
            again = server.post("/v1/completions", body | {"max_tokens": 2}).json()
            assert again["id"] == "cmpl-mine" and again["usage"]["completion_tokens"] == 2
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
