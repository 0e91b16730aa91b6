"""One depth for a client's own JSON, wherever it comes in: more is refused at the door, and as much is answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.json_depth import MAX_JSON_DEPTH, is_too_deep
from server.tools.calls import object_in
from tests.server.harness import Running, serve, small

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve(info=small(4096)) as running:
        yield running


def objects(depth: int) -> Json:
    made: Json = {}
    for _ in range(depth - 1):
        made = {"a": made}
    return made


def lists(depth: int) -> Json:
    made: Any = []
    for _ in range(depth - 2):
        made = [made]
    return {"a": made}


def user(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "x"}], **fields}


def call(arguments: Json) -> Json:
    return {"type": "function", "id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}}


PLACES: dict[str, tuple[str, Callable[[Json], Json], str]] = {
    "chat tools": (
        "/v1/chat/completions",
        lambda deep: user(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}]),
        "tools[0].function.parameters",
    ),
    "chat arguments": (
        "/v1/chat/completions",
        lambda deep: {"messages": [{"role": "assistant", "tool_calls": [call(deep)]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "chat variables": (
        "/v1/chat/completions",
        lambda deep: user(chat_template_kwargs={"a": deep["a"]}),
        "chat_template_kwargs",
    ),
    "responses tools": (
        "/v1/responses",
        lambda deep: {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": deep}]},
        "tools[0].parameters",
    ),
    "responses arguments": (
        "/v1/responses",
        lambda deep: {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps(deep)}]},
        "input[0].arguments",
    ),
    "messages tools": (
        "/v1/messages",
        lambda deep: user(model="toy", max_tokens=5, tools=[{"name": "f", "input_schema": deep}]),
        "tools[0].input_schema",
    ),
    "messages input": (
        "/v1/messages",
        lambda deep: {
            "model": "toy",
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": deep}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "y"}]},
            ],
        },
        "messages[1].content[0].input",
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [objects, lists])
def test_the_deepest_is_answered_and_one_level_more_is_refused(
    server: Running, place: str, shape: Callable[[int], Json]
) -> None:
    path, body, param = PLACES[place]
    response = server.post(path, body(shape(MAX_JSON_DEPTH)))
    assert response.status_code == 200, response.text
    for depth in (MAX_JSON_DEPTH + 1, 255, 900):
        error = server.post(path, body(shape(depth))).json()["error"]
        assert param in error["message"] and "nested deeper than 128 levels" in error["message"], error
        assert error.get("param", param) == param


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "text of structured_outputs"])
def test_schemas(server: Running, field: str) -> None:
    deep = objects(MAX_JSON_DEPTH + 1)
    fields: Json = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": deep}}},
        "structured_outputs": {"structured_outputs": {"json": deep}},
        "text of structured_outputs": {"structured_outputs": {"json": json.dumps(deep)}},
    }[field]
    response = server.post("/v1/chat/completions", user(**fields))
    assert response.status_code == 400 and "nested deeper than 128 levels" in response.json()["error"]["message"]


def test_fields_that_are_not_the_clients_own(server: Running) -> None:
    error = server.post("/v1/chat/completions", user(metadata=objects(60))).json()["error"]
    assert error["param"].startswith("metadata.a.a") and "nested deeper than 32 levels" in error["message"]


def test_depth() -> None:
    assert not is_too_deep(objects(MAX_JSON_DEPTH)) and is_too_deep(objects(MAX_JSON_DEPTH + 1))
    assert not is_too_deep(lists(MAX_JSON_DEPTH)) and is_too_deep(lists(MAX_JSON_DEPTH + 1))
    assert not is_too_deep("text") and not is_too_deep({"a": [1] * 100_000})


def test_arguments_that_a_model_nests_too_deep_are_no_object() -> None:
    assert object_in(json.dumps(objects(MAX_JSON_DEPTH))) is not None
    for depth in (MAX_JSON_DEPTH + 1, 5000):
        assert object_in('{"a":' * depth + "1" + "}" * depth) is None
