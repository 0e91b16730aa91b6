"""/v1/responses: OpenAI's shapes, whole and as events; nothing is remembered, and what would need that is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from scheduler.sampling_defaults import SamplingDefaults
from server.responses.body import ResponsesBody
from server.responses.conversation import chat_fields
from tests.server.fake_engine import EOS, say
from tests.server.harness import Running, serve, small


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve() as running:
        yield running


def ask(server: Running, **body: Any) -> Any:
    response = server.post("/v1/responses", {"input": "hi"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def asked(server: Running) -> str:
    """The text of the prompt that the engine got last."""
    return bytes(server.engine.submitted[-1].prompt_token_ids).decode()


def events_of(url: str, **body: Any) -> list[dict[str, Any]]:
    body = {"input": "hi", "stream": True} | body
    with httpx.stream("POST", url + "/v1/responses", json=body, timeout=20) as stream:
        text = "".join(stream.iter_text())
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def test_a_response(server: Running) -> None:
    got = ask(server, instructions="be kind", metadata={"a": "b"}, temperature=0.5)
    assert asked(server) == "<system>be kind<user>hi<assistant>"
    assert got["id"].startswith("resp_") and got["object"] == "response" and got["status"] == "completed"
    assert got["model"] == "toy" and got["error"] is None and got["incomplete_details"] is None
    (item,) = got["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert got["usage"] == {
        "input_tokens": 34,
        "input_tokens_details": {"cached_tokens": 17, "cache_write_tokens": 17},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 40,
    }
    assert (got["instructions"], got["metadata"], got["temperature"]) == ("be kind", {"a": "b"}, 0.5)
    assert (got["tools"], got["tool_choice"], got["store"], got["text"]["format"]) == (
        [],
        "auto",
        False,
        {"type": "text"},
    )


def test_an_answer_repeats_the_sampling_that_was_used() -> None:
    info = small(256)
    with serve(info=replace(info, sampling=SamplingDefaults(temperature=0.2, top_p=0.9))) as server:
        assert [ask(server)[name] for name in ("temperature", "top_p")] == [0.2, 0.9]
        assert [ask(server, top_p=1.0)[name] for name in ("temperature", "top_p")] == [0.2, 1.0]


def test_max_output_tokens_leaves_it_incomplete(server: Running) -> None:
    got = ask(server, max_output_tokens=2)
    assert got["status"] == "incomplete" and got["incomplete_details"] == {"reason": "max_output_tokens"}
    assert got["output"][0]["status"] == "incomplete" and got["output"][0]["content"][0]["text"] == "he"
    assert events_of(server.url, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_events(server: Running) -> None:
    events = events_of(server.url)
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = events[4:-4]
    assert {each["type"] for each in deltas} == {"response.output_text.delta"}
    assert "".join(each["delta"] for each in deltas) == events[-4]["text"] == "hello"
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    ids = {each["item_id"] for each in events if "item_id" in each}
    assert ids == {events[2]["item"]["id"]} == {events[-1]["response"]["output"][0]["id"]}
    whole = events[-1]["response"]
    assert whole["status"] == "completed" and whole["usage"]["output_tokens"] == 6
    assert whole["output"] == [events[-2]["item"]] and whole["output"][0]["content"] == [events[-3]["part"]]


def test_an_answer_without_text_is_an_item_all_the_same() -> None:
    with serve(script=lambda _: [EOS]) as server:
        assert ask(server)["output"][0]["content"][0]["text"] == ""
        kinds = [each["type"].removeprefix("response.") for each in events_of(server.url)]
        assert kinds[2:5] == ["output_item.added", "content_part.added", "output_text.done"]


def test_items_become_the_templates_messages(server: Running) -> None:
    answer = ask(server)["output"][0]
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        answer,
        {"type": "message", "role": "user", "content": "c"},
    ]
    ask(server, input=items)
    assert asked(server) == "<system>be kind<user>a\nb<assistant>hello<user>c<assistant>"


def test_logprobs(server: Running) -> None:
    got = ask(server, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = got["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in logprobs] == ["h", "e", "l", "l", "o", "<eos>"]
    assert len(logprobs[0]["top_logprobs"]) == 2
    events = events_of(server.url, include=["message.output_text.logprobs"])
    streamed = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert [each["token"] for each in streamed] == ["h", "e", "l", "l", "o", "<eos>"]


WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


def test_a_call() -> None:
    with serve(script=say(f"Let me see. {CALL}"), info=small(4096)) as server:
        said, call = ask(server, tools=[WEATHER])["output"]
        assert said["type"] == "message" and said["content"][0]["text"].strip() == "Let me see."
        assert call["type"] == "function_call" and call["name"] == "weather" and call["status"] == "completed"
        assert json.loads(call["arguments"]) == {"town": "Oslo"} and re.fullmatch("[a-zA-Z0-9]{9}", call["call_id"])


def test_a_call_as_events() -> None:
    with serve(script=say(CALL), info=small(4096)) as server:
        events = events_of(server.url, tools=[WEATHER])
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[2] == "output_item.added" and events[2]["item"]["arguments"] == ""
    deltas = [each for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert kinds[3:-3] == ["function_call_arguments.delta"] * len(deltas)
    done, item, whole = events[-3:]
    assert done["type"] == "response.function_call_arguments.done"
    assert "".join(each["delta"] for each in deltas) == done["arguments"] == item["item"]["arguments"]
    assert whole["response"]["output"] == [item["item"]] and done["item_id"] == item["item"]["id"]


def test_a_call_that_was_cut_off_is_taken_back() -> None:
    with serve(script=say(CALL), info=small(4096)) as server:
        for size in range(CALL.index("Oslo") - 12, CALL.index("Oslo") + 6):
            output = ask(server, tools=[WEATHER], max_output_tokens=size)["output"]
            ask(server, tools=[WEATHER], input=[{"role": "user", "content": "hi"}, *output], max_output_tokens=1)


def test_calls_and_what_they_gave_go_into_the_conversation() -> None:
    body = ResponsesBody.model_validate(
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
            ],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        }
    )
    fields = chat_fields(body)
    _, calls, first, second = fields["messages"]
    assert [call["id"] for call in calls["tool_calls"]] == ["c1", "c2"] and "content" not in calls
    assert (first, second) == (
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "cold"},
    )
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert fields["tools"][0]["function"]["name"] == "weather"
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "r"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 600}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "5"}]}, "input[0].arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "é", "schema": {}}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"x-guidance": {}}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
    ],
)
def test_what_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {"input": "hi"} | body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_nothing_is_stored(server: Running) -> None:
    got = ask(server, store=True)
    assert got["store"] is False
    assert httpx.get(f"{server.url}/v1/responses/{got['id']}").status_code == 404


def test_an_error_after_the_start_is_an_event() -> None:
    with serve(fail_at=lambda _: 2) as server:
        last = events_of(server.url)[-1]
        assert last["type"] == "error" and "the step failed" in last["message"] and last["code"] == "engine_error"
