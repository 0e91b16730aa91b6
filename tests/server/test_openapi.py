"""The OpenAPI document: every route is told, with examples that the server takes and gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.commands import (
    AdapterInfo,
    CacheEffect,
    ChangeCache,
    Command,
    ListAdapters,
    LoadAdapter,
    PlanPrompt,
    UnloadAdapter,
)
from scheduler.messages import BlockReport, CacheReport
from server.examples import BAD_REQUEST, EXAMPLES, MESSAGES_BAD_REQUEST, MODEL, Example
from server.state import ServerSettings
from tests.server import fake_engine
from tests.server.harness import Running, serve

INFO = replace(fake_engine.INFO, vocab_size=49152)
POET = AdapterInfo("poet", "/adapters/poet", 8, "v")
ALL = EXAMPLES.items()


def answer(command: Command) -> object:
    if isinstance(command, ChangeCache):
        return CacheEffect(3, 3 * 4096, {"device": 3})
    if isinstance(command, PlanPrompt):
        return CacheReport(1, 0, ((0, 1),), 0, 0, 0, 0, (BlockReport(0, 0, 1, None, "computed"),))
    if isinstance(command, ListAdapters):
        return (POET,)
    assert isinstance(command, LoadAdapter | UnloadAdapter)
    return AdapterInfo("poet", "/adapters/poet", 8, "w")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve(ServerSettings(MODEL), adapters=(POET,), answer=answer, info=INFO) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    return httpx.get(server.url + "/openapi.json").json()


def test_every_route_has_an_example(document: Any) -> None:
    told = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert told == EXAMPLES.keys()
    for (method, path), example in ALL:
        operation = document["paths"][path][method]
        assert operation["summary"], path
        content = operation["responses"]["200"].get("content", {})
        assert ([] if example.response is None else [example.response]) == [
            each["example"] for kind, each in content.items() if kind != "text/event-stream"
        ]
        if example.request is not None:
            assert operation["requestBody"]["content"]["application/json"]["example"] == example.request
            assert set(operation["responses"]) == {"200", "400"}


def test_every_body_has_a_schema(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for (method, path), example in ALL:
        if example.request is not None:
            schema = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
            for each in schema.get("anyOf", [schema]):
                assert each["$ref"].removeprefix("#/components/schemas/") in schemas, path
    assert "cache_salt" in schemas["CompletionBody"]["properties"]
    assert schemas["CompletionBody"]["required"] == ["prompt"]
    references = [line for line in str(document).split("'") if line.startswith("#/")]
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= schemas.keys()


@pytest.mark.parametrize(("place", "example"), ALL, ids=[path for _, path in EXAMPLES])
def test_what_is_sent_is_taken_and_what_comes_back_has_that_shape(
    server: Running, place: tuple[str, str], example: Example
) -> None:
    method, path = place
    url = server.url + path.replace("{name}", "poet")
    response = httpx.request(method, url, json=example.request, timeout=20)
    assert response.status_code == 200, response.text
    if example.response is None:
        assert response.content == b""
    elif isinstance(example.response, str):
        assert response.headers["content-type"].startswith("text/plain")
    else:
        assert shape(response.json()) == shape(example.response)


def shape(value: Any) -> Any:
    """Names and nesting, of lists that of the first."""
    if isinstance(value, dict):
        named = {name: shape(each) for name, each in value.items()}
        return "by name" if "device" in named else named
    if isinstance(value, list):
        return [shape(each) for each in value[:1] if isinstance(each, dict)]
    return "value"


@pytest.mark.parametrize("path", [path for (_, path), example in ALL if example.events is not None])
def test_events_are_told_as_they_come(server: Running, path: str) -> None:
    example = EXAMPLES["post", path]
    assert example.request is not None and example.events is not None
    response = httpx.post(server.url + path, json=example.request | {"stream": True}, timeout=20)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = [line.split(":")[0] for line in example.events.splitlines()]
    got = [line.split(":")[0] for line in response.text.splitlines()]
    assert set(told) == set(got)
    assert ("[DONE]" in example.events) == ("[DONE]" in response.text)


def test_errors_are_told_as_they_come(server: Running) -> None:
    assert server.post("/v1/completions", {}).json() == BAD_REQUEST
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert server.post("/v1/messages", body).json() == MESSAGES_BAD_REQUEST


def test_the_documents_name_every_route_and_field(document: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    named = {name.removeprefix("POST ").removeprefix("GET ") for name in re.findall(r"`([^`]+)`", text)}
    assert [path for _, path in EXAMPLES if path not in named] == []
    for body, schema in document["components"]["schemas"].items():
        if body.endswith("Body"):
            assert [field for field in schema["properties"] if field not in named] == [], body
