"""From Anthropic's turns to a chat body, and to what of the conversation each cache breakpoint covers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import orjson

from server.messages.body import Block, Breakpoint, CountBody, MessagesBody, TextBlock, Tool, ToolResultBlock

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
            self._mark(tool.cache_control)
        for block in body.system:
            self._part("system", block)
            self._mark(block.cache_control)
        for turn in body.messages:
            for each in turn.content:
                self._add(turn.role, each)
                self._mark(each.cache_control)
        self._mark(body.cache_control)

    def _add(self, role: str, block: Block) -> None:
        if isinstance(block, TextBlock):
            self._part(role, block)
        elif isinstance(block, ToolResultBlock):
            text = "\n".join(part.text for part in block.content)
            self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
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
    if body.tools:
        fields["tools"] = [chat_tool(tool) for tool in body.tools]
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
