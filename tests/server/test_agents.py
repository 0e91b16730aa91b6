"""Bodies of the shapes that coding agents send: Claude Code to /v1/messages, Codex to /v1/responses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from server.state import ServerSettings
from tests.server.fake_engine import say
from tests.server.harness import Running, serve, small

Json = dict[str, Any]
MARK = {"type": "ephemeral"}
READ = {
    "name": "Read",
    "description": "Read a file.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"file_path": {"type": "string"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
CLAUDE_CODE: Json = {
    "model": "toy",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": MARK},
        {"type": "text", "text": "The folder is /work.", "cache_control": MARK | {"ttl": "5m", "scope": "global"}},
    ],
    "tools": [
        READ | {"eager_input_streaming": True, "cache_control": MARK},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "metadata": {"user_id": "user_1_account__session_2"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What does a.py do?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must read it.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "ZGF0YQ=="},
                {"type": "text", "text": "I will look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "print(1)"}]},
                {"type": "text", "text": "Go on.", "cache_control": MARK},
            ],
        },
        {"role": "system", "content": "Three files are open."},
        {"role": "user", "content": "And now?"},
    ],
}
CODEX: Json = {
    "model": "toy",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What does a.py do?"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "ZGF0YQ=="},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["cat", "a.py"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "print(1)"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Run a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
        },
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "service_tier": "priority",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    settings = ServerSettings("toy", clamps_max_tokens=True)
    with serve(settings, script=say("It prints 1."), info=small(2048)) as running:
        yield running


def last_event(text: str) -> Any:
    return json.loads(text.strip().split("\n")[-1].removeprefix("data: "))


def said(text: str) -> str:
    """The text of a stream's events, of either API."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
    deltas = [event.get("delta", "") for event in events]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def test_claude_code(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagekv"):
        response = server.post("/v1/messages?beta=true", CLAUDE_CODE)
    assert response.status_code == 200, response.text
    assert last_event(response.text) == {"type": "message_stop"}
    assert said(response.text) == "It prints 1."
    assert "bash_20250124, web_search_20250305" in caplog.text
    asked = server.engine.submitted[-1]
    prompt = bytes(asked.prompt_token_ids).decode()
    for text in ("You are a coding agent.", "I will look.", "print(1)", "Three files are open.", "And now?", "Read"):
        assert text in prompt
    assert "web_search" not in prompt and "ZGF0YQ" not in prompt
    assert asked.params.max_tokens == 2048 - len(prompt.encode())
    counted = {key: value for key, value in CLAUDE_CODE.items() if key not in ("max_tokens", "stream", "temperature")}
    del counted["metadata"]
    count = server.post("/v1/messages/count_tokens?beta=true", counted)
    assert count.json() == {"input_tokens": len(asked.prompt_token_ids)}, count.text


def test_codex(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagekv"):
        response = server.post("/v1/responses", CODEX | {"parallel_tool_calls": True})  # false needs a real vocabulary
    assert response.status_code == 200, response.text
    end = last_event(response.text)
    assert end["type"] == "response.completed" and said(response.text) == "It prints 1."
    assert end["response"]["reasoning"] == {"effort": "medium", "summary": None}
    assert "custom, local_shell, web_search" in caplog.text
    prompt = bytes(server.engine.submitted[-1].prompt_token_ids).decode()
    for text in ("You are a coding agent.", "Sandbox: none.", "What does a.py do?", "print(1)", "shell"):
        assert text in prompt
    assert "apply_patch" not in prompt and "ZGF0YQ" not in prompt


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "disabled"}, {"type": "between_tools"}])
def test_kinds_of_thinking(server: Running, thinking: Json) -> None:
    assert server.post("/v1/messages", CLAUDE_CODE | {"thinking": thinking}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 9000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9000}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9000}),
        ("/v1/messages", {"model": "toy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9000}),
    ],
)
def test_more_tokens_than_there_is_room_for(server: Running, path: str, body: Json) -> None:
    assert server.post(path, body).status_code == 200
    asked = server.engine.submitted[-1]
    assert asked.params.max_tokens == 2048 - len(asked.prompt_token_ids)
    with serve() as strict:
        error = strict.post(path, body).json()["error"]
        assert "maximum context length" in error["message"]


def test_a_prompt_without_room_is_refused_all_the_same(server: Running) -> None:
    error = server.post("/v1/completions", {"prompt": "x" * 3000, "max_tokens": 1}).json()["error"]
    assert error["code"] == "context_length_exceeded"
