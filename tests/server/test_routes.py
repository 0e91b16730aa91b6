"""Routes over a real socket: answers, refusals, and a server that still works after them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.prompt import MAX_PROMPTS
from server.state import ServerSettings
from server.version import VERSION
from tests.server.fake_engine import EOS, say
from tests.server.harness import ByteTokenizer, Running, serve, small

LIMIT = 200_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all refusals; each test ends with an answered request, which shows that it still works."""
    with serve(ServerSettings("toy", max_body_bytes=LIMIT), info=small(64)) as running:
        yield running


@pytest.fixture(autouse=True)
def still_works(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        running: Running = request.getfixturevalue("server")
        answer = running.post("/v1/completions", {"model": "toy", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "hello"


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return body["error"]


def test_completion(server: Running) -> None:
    answer = server.post("/v1/completions", {"model": "toy", "prompt": "abcd", "max_tokens": 3}).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "toy"
    (choice,) = answer["choices"]
    assert {key: value for key, value in choice.items() if value is not None} == {
        "index": 0,
        "text": "hel",
        "finish_reason": "length",
    }
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ([299], [(299,)]),
    ],
)
def test_forms_of_a_prompt(server: Running, prompt: Any, ids: list[tuple[int, ...]]) -> None:
    before = len(server.engine.submitted)
    answer = server.post("/v1/completions", {"prompt": prompt}).json()
    assert [request.prompt_token_ids for request in server.engine.submitted[before:]] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ("", "prompt", "empty_prompt"),
        ([], "prompt", "empty_prompt"),
        ([[]], "prompt[0]", "empty_prompt"),
        (["a", ""], "prompt[1]", "empty_prompt"),
        (5, "prompt", "invalid_value"),
        ({"a": 1}, "prompt", "invalid_value"),
        ([1, 300], "prompt[1]", "invalid_token_id"),
        ([1, -1], "prompt[1]", "invalid_token_id"),
        ([[1], [2, 10**18]], "prompt[1][1]", "invalid_token_id"),
        ([1, "a"], "prompt[1]", "invalid_value"),
        ([1, 1.5], "prompt[1]", "invalid_value"),
        ([True], "prompt[0]", "invalid_value"),
        ([1, [2]], "prompt[1]", "invalid_value"),
        (["a", [2]], "prompt[1]", "invalid_value"),
        ([["a"]], "prompt[0][0]", "invalid_value"),
        ([{"a": 1}], "prompt[0]", "invalid_value"),
        (["a"] * (MAX_PROMPTS + 1), "prompt", "too_many_prompts"),
        ("x" * 65, "prompt", "context_length_exceeded"),
        ("x" * 64, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_prompts(server: Running, prompt: Any, param: str, code: str) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": prompt}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_a_token_outside_the_vocabulary_is_named_with_its_index(server: Running) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": [1, 2, 300]}), 400)
    assert error["message"] == "Invalid 'prompt[2]': token id 300 is outside the vocabulary of 300 tokens."


def test_context_errors_name_both_numbers(server: Running) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": "x" * 60, "max_tokens": 5}), 400)
    assert "maximum context length is 64 tokens" in error["message"]
    assert "60 tokens of prompt + 5 of output = 65 tokens" in error["message"]
    chat = {"messages": [{"role": "user", "content": "x" * 100}]}
    error = error_of(server.post("/v1/chat/completions", chat), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_default_max_tokens_takes_the_room_there_is(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "x" * 63})
    assert server.engine.submitted[-1].params.max_tokens == 1
    server.post("/v1/completions", {"prompt": "x"})
    assert server.engine.submitted[-1].params.max_tokens == 16
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert server.engine.submitted[-1].params.max_tokens == 64 - len("<user>x<assistant>")


def test_body_too_large_is_refused_while_it_is_read(server: Running) -> None:
    big = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    headers = {"content-type": "application/json"}
    error = error_of(httpx.post(server.url + "/v1/completions", content=big, headers=headers), 413)
    assert str(LIMIT) in error["message"]
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        while sent < 10_000_000:
            sent += 50_000
            yield b"x" * 50_000

    error_of(httpx.post(server.url + "/v1/completions", content=pieces(), headers=headers), 413)


def test_body_too_large_is_refused_before_it_is_sent(server: Running) -> None:
    """With the declared length alone: the client has not sent one byte of the body."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as raw:
        raw.sendall(HEAD % 9_999_999)
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
    ],
)
def test_not_json(server: Running, content: bytes, content_type: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error_of(httpx.post(server.url + path, content=content, headers={"content-type": content_type}), 400)


def test_an_unforeseen_error_ends_its_connection_in_order(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a secret")

    with httpx.Client(base_url=server.url) as client, monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_job", fails)
        for _ in range(3):  # on one connection the second would meet a reset
            response = client.post("/v1/completions", json={"prompt": "x"})
            assert error_of(response, 500)["message"] == "The server failed to answer this request."
            assert response.headers["connection"] == "close"


def test_unknown_model(server: Running) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = error_of(server.post(path, {"model": "gpt-9", **body}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(httpx.get(server.url + "/v1/models/gpt-9"), 404)


def test_models(server: Running) -> None:
    listed = httpx.get(server.url + "/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["toy"]
    assert listed["data"][0]["max_model_len"] == 64
    assert httpx.get(server.url + "/v1/models/toy").json() == listed["data"][0]


def test_a_model_name_with_slashes() -> None:
    with serve(ServerSettings("org/toy")) as server:
        assert httpx.get(server.url + "/v1/models/org/toy").json()["id"] == "org/toy"


def test_unknown_routes_and_methods(server: Running) -> None:
    assert "/v1/nothing" in error_of(httpx.get(server.url + "/v1/nothing"), 404)["message"]
    response = httpx.get(server.url + "/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(httpx.post(server.url + "/v1/models/"), 405)


def test_health_and_version(server: Running) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/version").json() == {"version": VERSION}
    head = httpx.head(server.url + "/health")
    assert (head.status_code, head.content) == (200, b"")


def test_a_template_that_refuses(server: Running) -> None:
    error = error_of(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "rude"}]}), 400)
    assert error["param"] == "messages" and "be polite" in error["message"]


def test_completion_logprobs(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "logprobs": 2}).json()
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["h", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}],
    }
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logprobs": 0}).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -0.5}]


def test_chat_logprobs(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    answer = server.post("/v1/chat/completions", body).json()
    entry = {"token": "h", "logprob": -0.5, "bytes": [104]}
    assert answer["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}


def test_logprobs_of_half_characters() -> None:
    with serve(script=say("é")) as server:
        body = {"prompt": "x", "max_tokens": 2, "logprobs": 0}
        logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["text_offset"] == [0, 0]


def test_stop_tokens_count_but_say_nothing() -> None:
    with serve(script=say("abc")) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "stop_token_ids": [98]}).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 98)
        assert answer["usage"]["completion_tokens"] == 2
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 9, "ignore_eos": True}).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("abc", 9)


def test_sampling_fields_reach_the_engine(server: Running) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1}
    fields |= {"presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 1, "ignore_eos": True, "max_tokens": 2}
    server.post("/v1/completions", {"prompt": "x", "priority": -3, **fields})
    request = server.engine.submitted[-1]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.priority == -3


def test_a_dead_engine_is_told() -> None:
    with serve(script=lambda _: [65], interval=0.005) as server:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 500}, timeout=20
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.engine.die()
            rest = [line for line in lines if line]
        assert "died" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
        assert httpx.get(server.url + "/health").status_code == 503
        assert "died" in error_of(server.post("/v1/completions", {"prompt": "x"}), 500)["message"]


def test_pipelined_and_split_requests_are_answered(server: Running) -> None:
    """Two requests in one packet, on one connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as raw:
        raw.sendall((HEAD % len(body) + body) * 2)
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 2 or not got.endswith(b"}"):
            got += raw.recv(65536)
    assert got.count(b'"text":"h"') == 2


def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    """While one request's text is being encoded, which takes two seconds, others are answered."""

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            encoding.set()
            time.sleep(2.0)
            return super().encode(text, add_special_tokens)

    encoding = threading.Event()
    with serve(tokenizer=Slow()) as server:
        waiting = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "long"}))
        waiting.start()
        assert encoding.wait(10)
        assert server.post("/v1/completions", {"prompt": [1, 2, 3]}).status_code == 200
        assert waiting.is_alive()
        waiting.join()


def test_eos_is_the_last_thing_said() -> None:
    with serve(script=lambda _: [104, EOS, 105]) as server:
        answer = server.post("/v1/completions", {"prompt": "x"}).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == ("h", None)
