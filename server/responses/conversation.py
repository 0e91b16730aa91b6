"""From the fields of the Responses API to a chat body."""

from __future__ import annotations

from typing import Any

from server.responses.body import CallItem, FunctionTool, MessageItem, NamedFunction, Part, ResponsesBody, SchemaFormat

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
    if body.include or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        fields |= {"tools": [chat_tool(tool) for tool in body.tools], "parallel_tool_calls": body.parallel_tool_calls}
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
    for item in body.input:
        if isinstance(item, MessageItem):
            made.append({"role": item.role, "content": text_parts(item.content)})
        elif isinstance(item, CallItem):
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant"})
            call = {"name": item.name, "arguments": item.arguments}
            made[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        else:
            text = "\n".join(part.text for part in item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    return made


def text_parts(parts: list[Part]) -> list[Json]:
    return [{"type": "text", "text": part.text} for part in parts]


def chat_tool(tool: FunctionTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
