"""From Anthropic's turns to a chat body, and to what of the conversation each cache breakpoint covers."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import shorten
from server.messages.body import (
    Block,
    Breakpoint,
    CountBody,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    breakpoint_of,
)

log = logging.getLogger("pagekv")

Json = dict[str, Any]

# What the fields of the chat body are here. Its messages are not the client's turns one by one.
RENAMINGS = (
    (r"^(messages|continue_final_message)\b.*", "messages"),
    (r"^response_format(\.json_schema)?\b", "output_config.format"),
    (r"^stop\b", "stop_sequences"),
    (r"^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
    (r"\.function\.parameters\b", ".input_schema"),
    (r"\.function\.", "."),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """The messages up to a breakpoint, and for how many seconds they should stay cached."""

    messages: list[Json]
    seconds: float


class Conversation:
    """The chat messages that the turns of a body are, and a cut at each breakpoint.

    Turns of the same role after one another are one turn. Results of tools are messages of their own, ahead of what the
    user says in the same turn.
    """

    def __init__(self, body: CountBody) -> None:
        self.messages: list[Json] = []
        self.cuts: list[Cut] = []
        for tool in body.tools:
            self._mark(breakpoint_of(tool))
        for block in body.system:
            self._part("system", block)
            self._mark(breakpoint_of(block))
        for turn in body.messages:
            for each in turn.content:
                self._add(turn.role, each)
                self._mark(breakpoint_of(each))
        self._mark(body.cache_control)

    def _add(self, role: str, block: Block) -> None:
        if isinstance(block, TextBlock):
            self._part(role, block)
        elif isinstance(block, ToolResultBlock):
            text = "\n".join(part.text for part in block.content)
            self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, ThinkingBlock):
            said = self._last(role)
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif not isinstance(block, RedactedThinkingBlock):
            arguments = orjson.dumps(block.input).decode()
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
            self._last(role).setdefault("tool_calls", []).append(call)

    def _part(self, role: str, block: TextBlock) -> None:
        self._last(role).setdefault("content", []).append({"type": "text", "text": block.text})

    def _last(self, role: str) -> Json:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]

    def _mark(self, mark: Breakpoint | None) -> None:
        if mark is not None:
            self.cuts.append(Cut(copy.deepcopy(self.messages), mark.seconds))


def chat_fields(body: CountBody, messages: list[Json]) -> Json:
    """The fields of a chat body that make the prompt. A turn of the assistant at the end is one to go on with."""
    fields: Json = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["tools"] = known_tools(body)
    variables = template_variables(body)
    if variables:
        fields["chat_template_kwargs"] = variables
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    if body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.json_schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def known_tools(body: CountBody) -> list[Json]:
    """The client's own. Others are left out: the model could not know them, and nobody here would run them."""
    skipped = sorted({tool.type for tool in body.tools if not isinstance(tool, Tool)})
    if skipped:
        log.info(
            "tools left out of a prompt, as only Anthropic's servers have them: %s", shorten(", ".join(skipped), 200)
        )
    return [chat_tool(tool) for tool in body.tools if isinstance(tool, Tool)]


def template_variables(body: CountBody) -> Json:
    thinking = None if body.thinking is None else body.thinking.is_enabled
    hints = {"enable_thinking": thinking, "reasoning_effort": body.output_config.effort}
    return {name: value for name, value in hints.items() if value is not None}


def chat_tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def generation_fields(body: MessagesBody) -> Json:
    """The fields of a chat body that say how to go on. At least one token is generated, wanted or not."""
    fields: Json = {
        "max_tokens": max(body.max_tokens, 1),
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    if body.cache_salt is not None:
        fields["cache_salt"] = body.cache_salt
    return fields
