"""Every field of OpenAI's two schemas, as the official client has them: it has an effect, or it is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams

from server.state import ServerSettings
from tests.server.fake_engine import say
from tests.server.harness import Running, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "seed": 1, "max_tokens": 5},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "seed": 1, "max_tokens": 5},
}
KEYS = {COMPLETIONS: set(typing.get_type_hints(CompletionParams)), CHAT: set(typing.get_type_hints(ChatParams))}

# Values that change what the engine is asked or what the client gets.
EFFECTIVE: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.5},
    "max_tokens": 2,
    "model": "toy-1",
    "n": 3,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["ll"],
    "stream": True,
    "temperature": 0.25,
    "top_p": 0.5,
}
EFFECTIVE_IN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"echo": True, "logprobs": 2, "prompt": "y"},
    CHAT: {
        "logprobs": True,
        "max_completion_tokens": 3,
        "messages": [{"role": "user", "content": "y"}],
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    },
}
EFFECTIVE_IN[COMPLETIONS]["stream_options"] = {"include_usage": True}
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "max_completion_tokens": {"max_tokens": None},
}
# OpenAI keeps these for its own purposes; an answer is the same with or without them.
HARMLESS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "store": True,
    "user": "me",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",  # a variable of the template, which this one does not have
    "service_tier": "flex",
    "verbosity": "low",
}
# The only value that is taken is the one that says what is the case anyway.
OFF: dict[str, Any] = {
    "best_of": 1,
    "modalities": ["text"],
}
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "suffix": "tail",
    "web_search_options": {},
}
OF_THEIR_OWN_TESTS = {"response_format", "tools", "tool_choice", "parallel_tool_calls"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve(ServerSettings("toy"), script=say("hello")) as running:
        yield running


def outcome(server: Running, path: str, **fields: Any) -> tuple[Any, Any]:
    """What the engine was asked, and what came back, without what differs from one answer to the next."""
    before = len(server.engine.submitted)
    response = server.post(path, {**BASE[path], **fields})
    asked = [dataclasses.replace(each, request_id="", after=None) for each in server.engine.submitted[before:]]
    text = re.sub(r'"id":"[^"]*"|"created":\d+', "", response.text)
    return asked, (response.status_code, response.headers["content-type"], text)


def effective(path: str) -> dict[str, Any]:
    return {key: value for key, value in (EFFECTIVE | EFFECTIVE_IN[path]).items() if key in KEYS[path]}


@pytest.mark.parametrize("path", KEYS)
def test_no_field_is_forgotten(path: str) -> None:
    known = effective(path).keys() | (HARMLESS | OFF | REFUSED).keys() | OF_THEIR_OWN_TESTS
    assert KEYS[path] - known == set()


@pytest.mark.parametrize(("path", "key"), [(path, key) for path in KEYS for key in sorted(effective(path))])
def test_a_field_has_an_effect(server: Running, path: str, key: str) -> None:
    others = WITH.get(key, {})
    without, with_it = outcome(server, path, **others), outcome(server, path, **{**others, key: effective(path)[key]})
    assert without[1][0] == 200
    if key == "model":
        assert with_it[1][0] == 404
    else:
        assert with_it[1][0] == 200, with_it
    assert with_it != without


@pytest.mark.parametrize(("path", "key"), [(p, key) for p in KEYS for key in sorted((HARMLESS | OFF).keys() & KEYS[p])])
def test_a_field_that_changes_nothing(server: Running, path: str, key: str) -> None:
    assert outcome(server, path, **{key: (HARMLESS | OFF)[key]}) == outcome(server, path)


@pytest.mark.parametrize(("path", "key"), [(path, key) for path in KEYS for key in sorted(REFUSED.keys() & KEYS[path])])
def test_a_field_is_refused_by_name(server: Running, path: str, key: str) -> None:
    response = server.post(path, {**BASE[path], key: REFUSED[key]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == key and repr(key) in error["message"]


@pytest.mark.parametrize("path", KEYS)
def test_null_is_absent_for_every_field(server: Running, path: str) -> None:
    nulls = dict.fromkeys(KEYS[path] - BASE[path].keys())
    assert outcome(server, path, **nulls) == outcome(server, path)


@pytest.mark.parametrize("path", KEYS)
def test_choices_and_what_they_count(server: Running, path: str) -> None:
    before = len(server.engine.submitted)
    answer = server.post(path, {**BASE[path], "n": 3}).json()
    asked = server.engine.submitted[before:]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [each.params.choice for each in asked] == [0, 1, 2] and {each.params.seed for each in asked} == {1}
    assert [each.after for each in asked] == [None, asked[0].request_id, asked[0].request_id]
    prompt = len(asked[0].prompt_token_ids)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (prompt, 15)


def test_choices_of_several_prompts(server: Running) -> None:
    body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}
    before = len(server.engine.submitted)
    answer = server.post(COMPLETIONS, body).json()
    asked = server.engine.submitted[before:]
    assert [choice["text"] for choice in answer["choices"]] == ["ah", "ah", "bch", "bch"]
    assert [each.after for each in asked] == [None, asked[0].request_id, None, asked[2].request_id]
    assert [each.params.prompt_logprobs for each in asked] == [1, None, 1, None], "a prompt is scored once"
    assert [each.cache.read for each in asked] == [False, True, False, True]
    assert answer["choices"][3]["logprobs"] == answer["choices"][2]["logprobs"]
    assert answer["usage"]["prompt_tokens"] == 3
    many = server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 65}).json()["error"]
    assert many["param"] == "n" and "130 choices" in many["message"]


def test_token_ids_of_a_completion(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [104, 101, 108])
    streamed = [each["choices"][0] for each in events(server, COMPLETIONS, body)]
    assert [each["prompt_token_ids"] for each in streamed] == [[97, 98], *[None] * (len(streamed) - 1)]
    assert [token for each in streamed for token in each["token_ids"]] == [104, 101, 108]
    assert server.post(COMPLETIONS, {"prompt": "ab"}).json()["choices"][0]["token_ids"] is None


def test_token_ids_of_a_chat(server: Running) -> None:
    body = BASE[CHAT] | {"return_token_ids": True, "stop": "lo"}
    answer = server.post(CHAT, body).json()
    prompt = list(b"<user>x<assistant>")
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == list(b"hello") and answer["choices"][0]["message"]["content"] == "hel"
    streamed = events(server, CHAT, body)
    assert streamed[0]["prompt_token_ids"] == prompt and "prompt_token_ids" not in streamed[1]
    assert [token for each in streamed[1:] for token in each["choices"][0]["token_ids"]] == list(b"hello")


def test_tokens_as_token_ids(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["token_id:104"], [{"token_id:104": -0.5}])
    body = BASE[CHAT] | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (entry,) = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["token"]) == (
        "token_id:104",
        [104],
        "token_id:104",
    )


@pytest.mark.parametrize("path", KEYS)
def test_usage_that_is_told_all_along(server: Running, path: str) -> None:
    """Only with include_usage, as in vLLM."""
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert all("usage" not in each for each in events(server, path, BASE[path] | {"stream_options": options}))
    options["include_usage"] = True
    chunks = events(server, path, BASE[path] | {"n": 2, "stream_options": options})
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    prompt = chunks[0]["usage"]["prompt_tokens"]
    for index in (0, 1):
        counts = [each["usage"] for each in chunks if each["choices"][0]["index"] == index]
        told = [each["completion_tokens"] for each in counts]
        assert told == sorted(told) and told[-1] == 5
        assert all(each["prompt_tokens"] == prompt for each in counts)
        assert all(each["total_tokens"] == prompt + each["completion_tokens"] for each in counts)


def events(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=20) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("keep", "left"), [(3, "def"), (6, "abcdef"), (9, "abcdef")])
def test_a_prompt_is_truncated_from_the_left(server: Running, keep: int, left: str) -> None:
    body = {"prompt": "abcdef", "max_tokens": 1, "truncate_prompt_tokens": keep, "echo": True, "logprobs": 0}
    for prompt in ("abcdef", list(b"abcdef")):
        answer = server.post(COMPLETIONS, body | {"prompt": prompt}).json()
        assert answer["choices"][0]["text"] == left + "h" and answer["usage"]["prompt_tokens"] == len(left)
        assert answer["choices"][0]["logprobs"]["text_offset"] == list(range(len(left) + 1))


def test_a_prompt_is_truncated_to_what_fits(server: Running) -> None:
    window = server.engine.info.max_model_len
    for path in KEYS:
        long = "y" * 2000
        asked = {"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
        answer = server.post(path, BASE[path] | asked | {"truncate_prompt_tokens": -1}).json()
        assert answer["usage"]["prompt_tokens"] == window - 5
    error = server.post(COMPLETIONS, {"prompt": "y" * 2000, "truncate_prompt_tokens": window}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_bad_words_are_spelled_with_and_without_a_space(server: Running) -> None:
    server.post(COMPLETIONS, {"prompt": "x", "bad_words": ["no", " yes"], "allowed_token_ids": [104, 110]})
    params = server.engine.submitted[-1].params
    assert params.bad_words == (tuple(b"no"), tuple(b"yes"))  # a byte more with the space: not the same length
    assert params.allowed_token_ids == (104, 110)


def test_the_request_id_is_in_the_answer(server: Running) -> None:
    for stop in (None, "A", None):  # a stop string leaves the engine's request to be ended behind the answer
        answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "request_id": "mine", "stop": stop})
        assert answer.json()["id"] == "cmpl-mine"
    assert server.post(CHAT, BASE[CHAT] | {"request_id": "mine"}).json()["id"] == "chatcmpl-mine"
    failed = server.post(COMPLETIONS, {"prompt": "x" * 9999, "request_id": "mine"})
    assert failed.json()["error"]["code"] == "context_length_exceeded"


def test_special_tokens_may_be_shown() -> None:
    with serve(script=lambda _: [104, 257, 105]) as server:
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == "hi"
        shown = server.post(COMPLETIONS, body | {"skip_special_tokens": False}).json()
        assert shown["choices"][0]["text"] == "h<eos>i"
        ended = {"prompt": "x", "skip_special_tokens": False}
        assert server.post(COMPLETIONS, ended).json()["choices"][0]["text"] == "h"
        ended["include_stop_str_in_output"] = True
        assert server.post(COMPLETIONS, ended).json()["choices"][0]["text"] == "h<eos>"
