"""From the fields of the Responses API to a chat body."""

from __future__ import annotations

import logging
from typing import Any

from server.errors import shorten
from server.responses.body import (
    CallItem,
    FunctionTool,
    MessageItem,
    NamedFunction,
    Part,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
)

log = logging.getLogger("pagekv")

Json = dict[str, Any]

# What the fields of the chat body are here. Its messages are not the client's items one by one.
RENAMINGS = (
    (r"^messages\b.*", "input"),
    (r"^response_format(\.json_schema)?\b", "text.format"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"\.function\.", "."),
)


def chat_fields(body: ResponsesBody) -> Json:
    """The chat body that has the same answer."""
    fields: Json = {
        "model": body.model,
        "messages": messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "cache_salt": body.cache_salt,
    }
    if body.has_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    fields |= {"tools": known_tools(body), "parallel_tool_calls": body.parallel_tool_calls}
    fields |= {"reasoning_effort": body.reasoning.effort, "chat_template_kwargs": body.chat_template_kwargs}
    if isinstance(body.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice
    shape = body.text.format
    if isinstance(shape, SchemaFormat):
        described = {"name": shape.name, "schema": shape.json_schema, "strict": shape.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": described}
    elif shape is not None:
        fields["response_format"] = {"type": shape.type}
    return fields


def messages(body: ResponsesBody) -> list[Json]:
    """Calls belong to the assistant's message before them, or to one of their own."""
    made: list[Json] = []
    if body.instructions is not None:
        made.append({"role": "system", "content": body.instructions})
    thoughts = ""
    for item in body.input:
        if isinstance(item, ReasoningItem):
            thoughts += "".join(part.text for part in item.content)
        elif isinstance(item, MessageItem):
            made.append({"role": item.role, "content": text_parts(item.content)})
            if item.role == "assistant" and thoughts:
                made[-1]["reasoning_content"] = thoughts
            thoughts = ""
        elif isinstance(item, CallItem):
            if not made or made[-1]["role"] != "assistant" or thoughts:
                made.append({"role": "assistant"} | ({"reasoning_content": thoughts} if thoughts else {}))
                thoughts = ""
            call = {"name": item.name, "arguments": item.arguments}
            made[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        else:
            text = "\n".join(part.text for part in item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    return made


def text_parts(parts: list[Part]) -> list[Json]:
    return [{"type": "text", "text": part.text} for part in parts]


def known_tools(body: ResponsesBody) -> list[Json]:
    """The client's functions. Other tools are left out: nobody here would run them."""
    skipped = sorted({tool.type for tool in body.tools if not isinstance(tool, FunctionTool)})
    if skipped:
        log.info("tools left out of a prompt, as only OpenAI's servers have them: %s", shorten(", ".join(skipped), 200))
    return [chat_tool(tool) for tool in body.tools if isinstance(tool, FunctionTool)]


def chat_tool(tool: FunctionTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
