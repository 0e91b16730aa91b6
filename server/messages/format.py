"""Answers in Anthropic's shape: a message, or the events of one."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from scheduler.messages import PrefixPin, PromptUsage
from server.choice import Choice, Delta
from server.errors import ApiError
from server.messages.body import SECONDS
from server.messages.errors import of_api_error
from server.wire import NamedWire

Json = dict[str, Any]


class MessagesFormat(NamedWire):
    """`pins` are the breakpoints of the request, in the order of the prompt; usage is told by them."""

    def __init__(self, model: str, pins: Sequence[PrefixPin]) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._pins = pins
        self._block: Json | None = None  # the block that is open
        self._index = 0

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        content: list[Json] = [{"type": "text", "text": choice.text}] if choice.text else []
        for call in choice.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.input or {}})
        return self._message(choice, content, choice.num_tokens) | ending(choice)

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        return [{"type": "message_start", "message": self._message(choice, [], 0)}, {"type": "ping"}]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        events: list[Json] = []
        if delta.text:
            events += self._open({"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": delta.text}))
        for piece in delta.calls:
            if piece.id is not None:
                events += self._open({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            if piece.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
        return events

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        end = ending(choice)
        usage = {**prompt_usage(choice.usage, self._pins), "output_tokens": choice.num_tokens}
        return [*self._close(), {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> list[Json]:
        return [of_api_error(error)]

    def ping(self) -> bytes:
        return self.event({"type": "ping"})

    def _message(self, choice: Choice, content: list[Json], output_tokens: int) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                **prompt_usage(choice.usage, self._pins),
                "output_tokens": output_tokens,
                "service_tier": "standard",
            },
        }

    def _open(self, block: Json) -> list[Json]:
        """The events that make `block` the open one; none if one of its type is."""
        if self._block is not None and self._block["type"] == block["type"] == "text":
            return []
        events = self._close()
        self._block = block
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[Json]:
        if self._block is None:
            return []
        self._block = None
        self._index += 1
        return [{"type": "content_block_stop", "index": self._index - 1}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def ending(choice: Choice) -> Json:
    """Why it ended. A stop token that is no string is a turn's end like any other."""
    if choice.is_calling:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "max_tokens" if choice.finish_reason == "length" else "end_turn", "stop_sequence": None}


def prompt_usage(usage: PromptUsage | None, pins: Sequence[PrefixPin]) -> Json:
    """Read, created and other tokens of the prompt, which add up to all of it.

    Read is what was not computed, with breakpoints or without. Created is what was computed up to the last breakpoint;
    each breakpoint counts what lies between it and the one before.
    """
    total = usage.prompt_tokens if usage is not None else 0
    end = read = usage.cached_tokens if usage is not None else 0
    created = dict.fromkeys(SECONDS, 0)
    for pin in pins:
        reach = min(pin.tokens, total)
        if reach > end:
            ttl = next(name for name, seconds in SECONDS.items() if seconds == pin.seconds)
            created[ttl] += reach - end
            end = reach
    return {
        "input_tokens": total - end,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": end - read,
        "cache_creation": {f"ephemeral_{name}_input_tokens": tokens for name, tokens in created.items()},
    }
