"""What operators ask, around a fake engine: which command each body becomes, and which bodies are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scheduler.commands import (
    AdapterInfo,
    CacheEffect,
    CacheTarget,
    ChangeCache,
    Command,
    CommandRefused,
    LoadAdapter,
    Operation,
    PlanPrompt,
    UnloadAdapter,
)
from scheduler.messages import BlockReport, CacheControl, CacheReport
from server.state import ServerSettings
from tests.server.harness import Running, serve, until
from tests.server.test_routes import HEAD, error_of

CHAT = [{"role": "user", "content": "hi"}]
PLAN = CacheReport(
    prompt_tokens=20,
    valid_prefix=0,
    computed=((7, 20),),
    reused=0,
    copied=7,
    loaded=0,
    pending=0,
    blocks=(
        BlockReport(0, 0, 16, "ab" * 16, "copied", "device", "different_token", 7, 65),
        BlockReport(1, 16, 20, None, "computed", reason="different_token"),
    ),
)


def answer(command: Command) -> object:
    """Adapters of any name: one from a path with `bad` in it does not load, and the path is its version."""
    match command:
        case ChangeCache():
            return CacheEffect(3, 300, {"device": 2, "host": 1})
        case PlanPrompt():
            return PLAN
        case LoadAdapter(name, path):
            if "bad" in path:
                raise CommandRefused(f"{path} has no adapter_config.json", "lora_path")
            return AdapterInfo(name, path, 8, path)
        case UnloadAdapter(name):
            return AdapterInfo(name, "", 8, "")


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    x = AdapterInfo("x", "/loras/x", 8, "/loras/x")
    with serve(ServerSettings("toy", body_timeout=0.5), answer=answer, adapters=[x]) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Running:
    shared.engine.commands.clear()
    shared.engine.submitted.clear()
    return shared


@pytest.mark.parametrize(
    ("body", "target"),
    [
        ({"prompt": "abc"}, CacheTarget(prompt=(97, 98, 99))),
        ({"model": "toy", "prompt": [1, 2]}, CacheTarget(prompt=(1, 2))),
        ({"model": "x", "prompt": [[1, 2]], "blocks": [1, 0]}, CacheTarget(prompt=(1, 2), blocks=(1, 0), adapter="x")),
        ({"prompt": [5], "cache_salt": "s"}, CacheTarget(prompt=(5,), cache_salt="s")),
        ({"messages": CHAT, "model": "x"}, CacheTarget(prompt=tuple(b"<user>hi<assistant>"), adapter="x")),
        ({"block_hash": "ab12"}, CacheTarget(block_hash="ab12")),
        ({"adapter": "gone"}, CacheTarget(adapter="gone")),
        ({"cache_salt": "s"}, CacheTarget(cache_salt="s")),
        ({"all": True, "prompt": None}, CacheTarget(everything=True)),
    ],
)
def test_targets(server: Running, body: Any, target: CacheTarget) -> None:
    for path, operation in (("drop", Operation.DROP), ("invalidate", Operation.INVALIDATE)):
        response = server.post(f"/v1/cache/{path}", body)
        assert response.json() == {"blocks": 3, "bytes": 300, "by_tier": {"device": 2, "host": 1}}
        assert server.engine.commands.pop() == ChangeCache(operation, target)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"model": "toy"}, None),
        ({"blocks": [1]}, None),
        ({"all": False}, "all"),
        ({"all": 1}, "all"),
        ({"prompt": "x", "messages": CHAT}, "messages"),
        ({"prompt": "x", "all": True}, "all"),
        ({"all": True, "cache_salt": "s"}, "cache_salt"),
        ({"block_hash": "ab", "adapter": "x"}, "adapter"),
        ({"prompt": "x", "messages": CHAT, "cache_salt": "s"}, "messages"),
        ({"prompt": "x", "adapter": "x", "cache_salt": "s"}, "adapter"),
        ({"block_hash": "ab", "model": "toy"}, "model"),
        ({"cache_salt": "s", "blocks": [1]}, "blocks"),
        ({"cache_salt": "s", "model": "x"}, "model"),
        ({"all": True, "blocks": [1]}, "blocks"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"block_hash": ""}, "block_hash"),
        ({"block_hash": 5}, "block_hash"),
        ({"adapter": ""}, "adapter"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 10**9]}, "prompt[1]"),
        ({"prompt": "x", "blocks": []}, "blocks"),
        ({"prompt": "x", "blocks": [0, -1]}, "blocks[1]"),
        ({"prompt": "x", "blocks": ["1"]}, "blocks[0]"),
        ({"prompt": "x", "blocks": 1}, "blocks"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "rude"}]}, "messages"),
        ({"prompt": "x", "max_tokens": 1}, "max_tokens"),
        ({"everything": True}, "everything"),
    ],
)
def test_bad_targets(server: Running, body: Any, param: str | None) -> None:
    for path in ("/v1/cache/drop", "/v1/cache/invalidate"):
        assert error_of(server.post(path, body), 400)["param"] == param
    assert server.engine.commands == []


def test_what_the_engine_refuses_names_the_field() -> None:
    def refuse(command: Command) -> object:
        raise CommandRefused("the prompt has 1 blocks, and no block 9", "blocks[0]")

    with serve(answer=refuse) as server:
        error = error_of(server.post("/v1/cache/drop", {"prompt": "x", "blocks": [9]}), 400)
        assert (error["param"], error["message"]) == ("blocks[0]", "The prompt has 1 blocks, and no block 9.")


def test_a_plan_is_asked_as_a_request_is(server: Running) -> None:
    body = {"model": "x", "prompt": "abcd", "cache_salt": "s", "cache": {"ttl": 3, "pin": True}, "priority": 2}
    body |= {"max_tokens": 3, "stream": True, "seed": 7, "cache_report": True}
    plan = server.post("/v1/cache/plan", body).json()
    assert list(plan) == "prompt_tokens valid_prefix computed reused copied loaded pending blocks".split()  # noqa: SIM905
    assert plan["computed"] == [[7, 20]]
    assert plan["blocks"] == [
        {
            "index": 0,
            "start": 0,
            "end": 16,
            "hash": "ab" * 16,
            "status": "copied",
            "tier": "device",
            "reason": "different_token",
            "first_difference": {"position": 7, "cached_token": 65},
        },
        {
            "index": 1,
            "start": 16,
            "end": 20,
            "hash": None,
            "status": "computed",
            "tier": None,
            "reason": "different_token",
            "first_difference": None,
        },
    ]
    (command,) = server.engine.commands
    assert isinstance(command, PlanPrompt) and not command.reveal
    planned = command.request
    assert server.post("/v1/completions", body | {"stream": False}).status_code == 200
    (sent,) = server.engine.submitted
    assert planned.prompt_token_ids == sent.prompt_token_ids and planned.params == sent.params
    assert (planned.cache_salt, planned.adapter, planned.priority) == (sent.cache_salt, sent.adapter, sent.priority)
    assert planned.cache == sent.cache == CacheControl(ttl=3.0, pin=True)
    assert sent.report and sent.adapter == "x"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "messages": CHAT}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "x" * 512}, 400, "prompt"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"messages": CHAT, "echo": True}, 400, "echo"),
        ({"messages": CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "blocks": [1]}, 400, "blocks"),
        ({"prompt": "x", "model": "y"}, 404, "model"),
        ({"messages": CHAT, "model": "y"}, 404, "model"),
    ],
)
def test_bad_plans(server: Running, body: Any, status: int, param: str) -> None:
    assert error_of(server.post("/v1/cache/plan", body), status)["param"] == param
    assert server.engine.commands == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("cache_salt", "", "cache_salt"),
        ("cache_salt", 5, "cache_salt"),
        ("cache_salt", "x" * 2000, "cache_salt"),
        ("cache", True, "cache"),
        ("cache", {"reed": True}, "cache.reed"),
        ("cache", {"read": 1}, "cache.read"),
        ("cache", {"ttl": 0}, "cache.ttl"),
        ("cache", {"ttl": -5}, "cache.ttl"),
        ("cache", {"ttl": "5"}, "cache.ttl"),
        ("cache", {"ttl": True}, "cache.ttl"),
        ("cache", {"pin": True, "write": False}, "cache.pin"),
        ("cache_report", 1, "cache_report"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("prompt_logprobs", True, "prompt_logprobs"),
    ],
)
def test_bad_fields(server: Running, field: str, value: Any, param: str) -> None:
    for path, asked in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
        assert error_of(server.post(path, asked | {field: value}), 400)["param"] == param
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["x", "y"], "cache_report": True}, "cache_report"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_fields_that_do_not_go_together(server: Running, body: Any, param: str) -> None:
    assert error_of(server.post("/v1/completions", body), 400)["param"] == param


def test_an_infinite_time_to_live_is_no_json(server: Running) -> None:
    headers = {"content-type": "application/json"}
    for value in ("1e999", "Infinity", "NaN"):
        content = '{"prompt": "x", "cache": {"ttl": ' + value + "}}"
        error_of(httpx.post(server.url + "/v1/completions", content=content, headers=headers), 400)


def test_echo_of_text_and_of_ids(server: Running) -> None:
    logprobs = {
        "text_offset": [0, 1, 2],
        "tokens": ["a", "b", "h"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -1.5}, {"h": -0.5, "i": -1.5}],
    }
    for prompt in ("ab", [97, 98]):
        body = {"prompt": prompt, "max_tokens": 1, "echo": True}
        choice = server.post("/v1/completions", body | {"logprobs": 2}).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("abh", logprobs)
        choice = server.post("/v1/completions", body | {"stop": ["a"]}).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("abh", None)  # a stop string of the prompt stops nothing
    assert [request.params.prompt_logprobs for request in server.engine.submitted] == [2, None, 2, None]
    assert [request.cache.read for request in server.engine.submitted] == [False, True, False, True]


def test_an_echo_alone_is_streamed_too(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 0, "stream": True}
    lines = [line for line in server.post("/v1/completions", body).text.split("\n\n") if line]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("ab", None), ("", "length")]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b"] and choices[1]["logprobs"] is None


def test_an_echo_alone_needs_room_for_the_token_that_is_made_all_the_same(server: Running) -> None:
    body = {"prompt": "x" * 512, "max_tokens": 0, "echo": True}
    message = error_of(server.post("/v1/completions", body), 400)["message"]
    assert "512 tokens of prompt and room for at least 1 token" in message


def test_an_echo_and_prompt_logprobs_keep_to_their_own_numbers(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert server.engine.submitted[-1].params.prompt_logprobs == 3
    assert choice["text"] == "ab" and choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
            "100": {"logprob": -2.5, "rank": 3, "decoded_token": "d"},
        },
    ]


def test_adapters_come_and_go() -> None:
    with serve(answer=answer) as server:
        load = {"lora_name": "x", "lora_path": "/loras/1"}
        response = server.post("/v1/load_lora_adapter", load)
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert response.headers["content-type"].startswith("text/plain")
        models = httpx.get(server.url + "/v1/models").json()["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in models] == [
            ("toy", "/nowhere/toy", None),
            ("x", "/loras/1", "toy"),
        ]
        assert httpx.get(server.url + "/v1/models/x").json() == models[1]
        completion = server.post("/v1/completions", {"model": "x", "prompt": "a"}).json()
        assert completion["model"] == "x" and server.engine.submitted[-1].adapter == "x"
        chat = server.post("/v1/chat/completions", {"model": "x", "messages": CHAT}).json()
        assert chat["model"] == "x" and server.engine.submitted[-1].adapter == "x"
        server.post("/v1/completions", {"prompt": "a"})
        assert server.engine.submitted[-1].adapter is None

        again = error_of(server.post("/v1/load_lora_adapter", load), 400)
        assert again["message"] == "The lora adapter 'x' has already been loaded."
        assert server.post("/v1/load_lora_adapter", load | {"load_inplace": True}).status_code == 200
        assert server.post("/v1/load_lora_adapter", load | {"lora_path": "/loras/2"}).status_code == 200
        assert httpx.get(server.url + "/v1/models/x").json()["root"] == "/loras/2"

        response = server.post("/v1/unload_lora_adapter", {"lora_name": "x"})
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert error_of(server.post("/v1/completions", {"model": "x", "prompt": "a"}), 404)["param"] == "model"
        gone = error_of(server.post("/v1/unload_lora_adapter", {"lora_name": "x"}), 404)
        assert gone["message"] == "The lora adapter 'x' cannot be found."


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("load", {}, "lora_name"),
        ("load", {"lora_name": "y"}, "lora_path"),
        ("load", {"lora_name": "", "lora_path": "/p"}, "lora_name"),
        ("load", {"lora_name": "y", "lora_path": ""}, "lora_path"),
        ("load", {"lora_name": "y", "lora_path": 5}, "lora_path"),
        ("load", {"lora_name": "toy", "lora_path": "/p"}, "lora_name"),
        ("load", {"lora_name": "y", "lora_path": "/bad"}, "lora_path"),
        ("load", {"lora_name": "y", "lora_path": "/p", "rank": 8}, "rank"),
        ("unload", {}, "lora_name"),
        ("unload", {"lora_name": 5}, "lora_name"),
    ],
)
def test_bad_adapters(server: Running, path: str, body: Any, param: str) -> None:
    assert error_of(server.post(f"/v1/{path}_lora_adapter", body), 400)["param"] == param
    assert [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]] == ["toy", "x"]


def test_a_dead_engine_answers_no_command() -> None:
    with serve(answer=answer) as server:
        server.engine.die()
        assert "died" in error_of(server.post("/v1/cache/drop", {"all": True}), 500)["message"]


def test_a_body_that_comes_too_slowly_is_given_up(server: Running) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as raw:
        raw.sendall(HEAD % 100 + b'{"prompt": ')
        got = b""
        while part := raw.recv(65536):  # until the server closes the connection
            got += part
    assert got.startswith(b"HTTP/1.1 408 ") and b"within 0.5 seconds" in got


def test_a_client_that_leaves_while_it_sends_is_no_error(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as raw:
        raw.sendall(HEAD % 100 + b'{"prompt": ')
    until(lambda: not shared_connections(server))
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert caplog.records == []


def shared_connections(server: Running) -> int:
    return len(server.server.server_state.tasks)
