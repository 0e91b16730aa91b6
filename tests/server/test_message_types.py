"""Every key of every message that the official clients can send: the template gets it, it changes nothing, or it is
refused by name."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import anthropic.types as claude
import openai.types.chat as chat
import openai.types.responses as responses
import pytest

from server.text.chat_template import TemplateSource
from tests.server.harness import ByteTokenizer, Running, serve, small

Json = dict[str, Any]


class TellingTokenizer(ByteTokenizer):
    """Its template writes down the messages as it got them."""

    takes_tools = True

    @property
    def template_source(self) -> TemplateSource:
        return TemplateSource("{{ messages | tojson }}", None, {}, ())


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve(tokenizer=TellingTokenizer(), info=small(4096)) as running:
        yield running


def told(server: Running, path: str, body: Json) -> Any:
    """The messages that the template got."""
    response = server.post(path, body | {"model": "toy"})
    assert response.status_code == 200, response.text
    return json.loads(bytes(server.engine.submitted[-1].prompt_token_ids))


# -- OpenAI's chat ----------------------------------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BASES: dict[str, tuple[Any, Json]] = {
    "system": (chat.ChatCompletionSystemMessageParam, {"content": "a"}),
    "developer": (chat.ChatCompletionDeveloperMessageParam, {"content": "a"}),
    "user": (chat.ChatCompletionUserMessageParam, {"content": "a"}),
    "assistant": (chat.ChatCompletionAssistantMessageParam, {"content": "a"}),
    "tool": (chat.ChatCompletionToolMessageParam, {"content": "a", "tool_call_id": "c"}),
    "function": (chat.ChatCompletionFunctionMessageParam, {"content": "a", "name": "f"}),
}
TOLD: Json = {
    "content": "marked",
    "name": "marked",
    "tool_call_id": "marked",
    "tool_calls": [CALL | {"id": "marked"}],
    "function_call": {"name": "marked", "arguments": "{}"},
    "reasoning_content": "marked",
    "reasoning": "marked",
}
UNTOLD: Json = {"annotations": [{"type": "url_citation"}], "refusal": "No.", "audio": None, "tool_calls": []}
REFUSED: Json = {"audio": {"id": "a"}}
FROM_SERVERS = {"assistant": {"annotations", "reasoning_content", "reasoning"}}  # what answers have besides


def message(role: str, **changes: Any) -> Json:
    return {"messages": [{"role": role, **BASES[role][1], **changes}]}


def keys(role: str) -> list[str]:
    return sorted((set(typing.get_type_hints(BASES[role][0])) | FROM_SERVERS.get(role, set())) - {"role"})


@pytest.mark.parametrize(("role", "key"), [(role, key) for role in BASES for key in keys(role)])
def test_a_key_of_a_chat_message(server: Running, role: str, key: str) -> None:
    path = "/v1/chat/completions"
    assert key in TOLD | UNTOLD, "a new key of the client's: decide what it means"
    if key in TOLD:
        assert "marked" in json.dumps(told(server, path, message(role, **{key: TOLD[key]})))
    if key in UNTOLD:
        assert told(server, path, message(role, **{key: UNTOLD[key]})) == told(server, path, message(role))
    if key in REFUSED:
        error = server.post(path, message(role, **{key: REFUSED[key]})).json()["error"]
        assert error["param"] == f"messages[0].{key}"


@pytest.mark.parametrize("content", ["", None, []])
def test_an_assistant_that_said_nothing(server: Running, content: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert told(server, "/v1/chat/completions", {"messages": turns})[1] == {"role": "assistant", "content": ""}


def test_calls_collected_from_a_stream_keep_their_index(server: Running) -> None:
    turns = message("assistant", content=None, tool_calls=[CALL | {"index": 0}])
    assert told(server, "/v1/chat/completions", turns)[0]["tool_calls"][0]["function"]["name"] == "f"


def test_older_calls_and_their_results(server: Running) -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    got = told(server, "/v1/chat/completions", {"messages": [older, {"role": "function", "name": "f", "content": "b"}]})
    assert got[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert got[1] == {"role": "tool", "content": "b", "name": "f"}


PARTS: list[tuple[str, Json, str]] = [
    ("user", {"type": "text", "text": "marked", "cache_control": {"type": "ephemeral"}}, "marked"),
    ("user", {"type": "text", "text": "marked", "prompt_cache_breakpoint": {"mode": "explicit"}}, "marked"),
    ("user", {"type": "input_text", "text": "marked"}, "marked"),
    ("assistant", {"type": "output_text", "text": "marked", "annotations": []}, "marked"),
    ("assistant", {"type": "refusal", "refusal": "marked"}, "marked"),
]


@pytest.mark.parametrize(("role", "part", "text"), PARTS)
def test_a_part_of_text(server: Running, role: str, part: Json, text: str) -> None:
    assert told(server, "/v1/chat/completions", message(role, content=[part]))[0]["content"] == text


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_a_part_that_is_no_text(server: Running, kind: str) -> None:
    error = server.post("/v1/chat/completions", message("user", content=[{"type": kind, kind: {}}])).json()["error"]
    assert error["param"].startswith("messages[0].content[0]")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "refusal"])
def test_what_is_the_assistants_alone(server: Running, role: str, key: str) -> None:
    error = server.post("/v1/chat/completions", message(role, **{key: (UNTOLD | TOLD)[key]})).json()["error"]
    assert error["param"] == f"messages[0].{key}"


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}]
)
def test_no_tools_is_what_clients_send_by_default(server: Running, fields: Json) -> None:
    plain = told(server, "/v1/chat/completions", message("user"))
    for tools in ({}, {"tools": []}, {"tools": None}):
        assert told(server, "/v1/chat/completions", message("user") | tools | fields) == plain
        assert server.post("/v1/responses", {"input": "x", **tools, **fields}).status_code == 200
        choice = {"tool_choice": {"type": fields["tool_choice"]}} if "tool_choice" in fields else {}
        body = {"model": "toy", "max_tokens": 5, "messages": message("user")["messages"], **tools, **choice}
        assert server.post("/v1/messages", body).status_code == 200


# -- Anthropic's messages ---------------------------------------------------------------------------------------------

MARK = {"type": "ephemeral", "ttl": "5m", "scope": "global"}
BLOCKS: dict[str, tuple[Any, str, Json, Json]] = {
    "text": (claude.TextBlockParam, "user", {"text": "marked"}, {"citations": [], "cache_control": MARK}),
    "thinking": (claude.ThinkingBlockParam, "assistant", {"thinking": "marked", "signature": "s"}, {}),
    "redacted_thinking": (claude.RedactedThinkingBlockParam, "assistant", {"data": "d"}, {}),
    "tool_use": (
        claude.ToolUseBlockParam,
        "assistant",
        {"id": "t", "name": "marked", "input": {}},
        {"cache_control": MARK, "caller": {"type": "direct"}, "toolset_name": "s"},
    ),
    "tool_result": (
        claude.ToolResultBlockParam,
        "user",
        {"tool_use_id": "t", "content": [{"type": "text", "text": "marked", "cache_control": MARK}]},
        {"cache_control": MARK, "is_error": True, "toolset_name": "s"},
    ),
}


def blocks(role: str, block: Json) -> Json:
    turns: list[Json] = [{"role": "user", "content": "a"}, {"role": role, "content": [{"type": "text", "text": "b"}]}]
    turns[1]["content"].append(block)
    return {"max_tokens": 5, "messages": [*turns, {"role": "user", "content": "c"}]}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_of_a_message(server: Running, kind: str) -> None:
    declared, role, required, optional = BLOCKS[kind]
    assert set(typing.get_type_hints(declared)) == {"type", *required, *optional}, "a new key of the client's"
    plain = told(server, "/v1/messages", blocks(role, {"type": kind, **required}))
    assert ("marked" in json.dumps(plain)) == (kind != "redacted_thinking")
    for key, value in optional.items():
        assert told(server, "/v1/messages", blocks(role, {"type": kind, **required, key: value})) == plain


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use", "web_search_tool_result"])
def test_a_block_that_is_no_text(server: Running, kind: str) -> None:
    response = server.post("/v1/messages", blocks("user", {"type": kind}) | {"model": "toy"})
    assert response.status_code == 400 and "'messages[1].content[1]'" in response.json()["error"]["message"]


def test_keys_of_a_tool(server: Running) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    more = {
        "type": "custom",
        "description": "d",
        "cache_control": MARK,
        "strict": False,
        "eager_input_streaming": True,
        "defer_loading": True,
        "allowed_callers": ["direct"],
        "input_examples": [{}],
    }
    assert set(typing.get_type_hints(claude.ToolParam)) == {*tool, *more}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    assert told(server, "/v1/messages", body | {"tools": [tool | more]})


# -- OpenAI's responses -----------------------------------------------------------------------------------------------


def test_reasoning_items_are_the_next_messages(server: Running) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "b"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "marked"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "d"},
    ]
    got = told(server, "/v1/responses", {"input": items})
    assert [each.get("reasoning_content") for each in got] == [None, None, None, "marked", None]
    assert got[3]["content"] == "No."
    known = set(typing.get_type_hints(responses.ResponseReasoningItemParam))
    assert known == {"id", "summary", "type", "content", "encrypted_content", "status"}
