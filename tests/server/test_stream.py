"""Server-sent events, byte for byte where it matters, and what ends them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from scheduler.messages import FinishReason
from tests.server.fake_engine import EOS, say
from tests.server.harness import serve, until


def stream(url: str, path: str, body: dict[str, Any]) -> tuple[httpx.Response, bytes]:
    response = httpx.post(url + path, json={**body, "stream": True}, timeout=20)
    return response, response.content


def events(raw: bytes) -> list[Any]:
    """Every event is one `data:` line and an empty line; the last is [DONE]."""
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    assert parts.pop() == b"data: [DONE]"
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_completion_stream() -> None:
    with serve(script=say("hi é")) as server:
        response, raw = stream(server.url, "/v1/completions", {"model": "toy", "prompt": "x"})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(raw)
    assert text_of(chunks) == "hi é"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert "usage" not in chunks[0]
    assert "�" not in text_of(chunks)


def test_chat_stream_begins_with_the_role_and_ends_with_usage() -> None:
    body = {"messages": [{"role": "user", "content": "hey"}], "stream_options": {"include_usage": True}}
    with serve() as server:
        chunks = events(stream(server.url, "/v1/chat/completions", body)[1])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "hello"
    assert chunks[-2]["choices"][0] | {"stop_reason": None} == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    prompt = len("<user>hey<assistant>")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


def test_stop_string_across_tokens_ends_the_engine_request() -> None:
    with serve(script=say("one two three four five"), interval=0.002) as server:
        body = {"prompt": "x", "max_tokens": 500, "stop": ["three", "zzz"], "stream_options": {"include_usage": True}}
        chunks = events(stream(server.url, "/v1/completions", body)[1])
        until(lambda: server.engine.terminal != [])
        assert server.engine.terminal[0][1] is FinishReason.ABORT
        metrics = httpx.get(server.url + "/metrics").text
    assert text_of(chunks) == "one two "
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "three")
    assert chunks[-1]["usage"]["completion_tokens"] == len("one two three")
    assert 'vllm:request_success_total{finished_reason="stop",model_name="toy"} 1.0' in metrics
    assert 'vllm:request_success_total{finished_reason="abort",model_name="toy"} 0.0' in metrics


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_stop_string_whole_answer(include: bool, text: str) -> None:
    with serve(script=say("one two three")) as server:
        body = {"prompt": "x", "max_tokens": 100, "stop": "two", "include_stop_str_in_output": include}
        answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == len("one two")


def test_stop_strings_wait_for_min_tokens() -> None:
    with serve(script=say("aXbXc")) as server:
        body = {"prompt": "x", "max_tokens": 100, "stop": "X", "min_tokens": 3}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "aXb"


def test_what_was_held_back_for_a_stop_string_is_not_lost() -> None:
    with serve(script=say("almost sto")) as server:
        body = {"prompt": "x", "max_tokens": 100, "stop": "stop"}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "almost sto"


def test_several_prompts_stream_as_several_choices() -> None:
    with serve(script=lambda request: [*request.prompt_token_ids, EOS]) as server:
        chunks = events(stream(server.url, "/v1/completions", {"prompt": ["ab", "cde"], "max_tokens": 9})[1])
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "cde"}
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 2


def test_error_before_the_stream_is_a_status() -> None:
    with serve(fail_at=lambda _: 0) as server:
        response, _ = stream(server.url, "/v1/completions", {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step failed: told to"
    assert response.json()["error"]["code"] == "engine_error"


def test_error_within_the_stream_is_an_event() -> None:
    with serve(fail_at=lambda _: 3) as server:
        response, raw = stream(server.url, "/v1/completions", {"prompt": "x"})
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert response.status_code == 200
    chunks = events(raw)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert text_of(chunks[:-1]) == "hel"


def test_one_failure_aborts_the_other_prompts_of_the_body() -> None:
    with serve(
        script=lambda _: [65], fail_at=lambda request: 3 if request.prompt_token_ids == (98,) else None, interval=0.001
    ) as server:
        response = server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 400})
        assert response.status_code == 500
        until(lambda: server.engine.num_running == 0)
        assert sorted(reason for _, reason in server.engine.terminal) == ["abort", "abort", "error"]


def test_shutdown_ends_running_streams_with_an_error() -> None:
    with (
        serve(script=lambda _: [65], interval=0.005) as server,
        httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 500, "stream": True}, timeout=20
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.bridge.stop_now()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
