"""Structured outputs of the default model, greedy, in batches: slow, as it is a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from model.source import resolve
from tests.server.json_schemas import SCHEMAS
from tests.server.real import RealServer, serve_real

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve_real(Path(resolve(None).path), num_blocks=1024) as running:
        yield running


def ask(server: RealServer, question: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 400, "temperature": 0}
    return post(server, "/v1/chat/completions", body | fields)["choices"][0]


def post(server: RealServer, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=3000)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_answer_fits_its_schema(server: RealServer) -> None:
    def answer(name: str) -> Any:
        """Greedy; where that goes on for ever, as a tree may, a drawn one that does not."""
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}}
        drawn = [{"temperature": 1.5, "seed": seed} for seed in range(4)]
        for fields in ({"temperature": 0}, *drawn):
            choice = ask(server, f"Give me an example of this as JSON: {name}.", response_format=form, **fields)
            if choice["finish_reason"] == "stop":
                break
        return choice

    with ThreadPoolExecutor(16) as pool:
        for name, choice in zip(SCHEMAS, pool.map(answer, SCHEMAS), strict=True):
            assert choice["finish_reason"] == "stop", (name, choice)
            found = json.loads(choice["message"]["content"])
            jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker()).validate(found)


def test_a_grammar_that_allows_what_is_said_changes_nothing(server: RealServer) -> None:
    question = "Name three colours. Answer with a JSON object alone."
    free = ask(server, question, max_tokens=60)
    assert ask(server, question, max_tokens=60, structured_outputs={"regex": "(?s:.*)"}) == free
    said = free["message"]["content"]
    begins = said.index("{")
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{said[:begins]}"
    fields = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    free_text = post(server, "/v1/completions", fields)["choices"][0]["text"]
    held = {"response_format": {"type": "json_object"}}
    held_text = post(server, "/v1/completions", fields | held)["choices"][0]["text"]
    assert held_text[:20] == free_text[:20]


def test_a_call_that_is_wanted_is_made(server: RealServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    choice = ask(
        server, "What is the weather in Paris?", tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"
