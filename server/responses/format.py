"""Answers in the shape of OpenAI's Responses API: a response, or the events of one.

response.created, response.in_progress
per item of output:  response.output_item.added, what the item is made of, response.output_item.done
response.completed, or response.incomplete where max_output_tokens ended it
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from scheduler.messages import PromptUsage
from server.choice import Choice, Delta, TokenEntry
from server.errors import ApiError
from server.logprobs import chat_logprobs
from server.responses.body import ResponsesBody
from server.tokenizer import Tokenizer
from server.wire import NamedWire

Json = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class ResponsesFormat(NamedWire):
    def __init__(self, model: str, body: ResponsesBody, tokenizer: Tokenizer) -> None:
        self.id = new_id("resp")
        self._tokenizer = tokenizer
        self._logprobs = bool(body.include) or body.top_logprobs is not None
        self._header: Json = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._asked = echoed(body)
        self._output: list[Json] = []  # items that are complete
        self._text: TextItem | None = None  # the item that is being written
        self._sequence = 0

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        item = TextItem(status_of(choice.finish_reason))
        item.add(choice.text, self._described(choice.entries))
        return self._response(choice, [item.json()], item.status)

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        return [
            self._event("response.created", response=self._response(choice, [], "in_progress")),
            self._event("response.in_progress", response=self._response(choice, [], "in_progress")),
        ]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        if not (delta.text or delta.entries):
            return []
        events = []
        if self._text is None:
            events += self._begin_text()
        assert self._text is not None
        logprobs = self._described(delta.entries)
        self._text.add(delta.text, logprobs)
        events.append(self._in_text("response.output_text.delta", delta=delta.text, logprobs=logprobs))
        return events

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        status = status_of(choice.finish_reason)
        events = self._begin_text() if self._text is None else []
        events += self._end_text(status)
        response = self._response(choice, self._output, status)
        return [*events, self._event(f"response.{status}", response=response)]

    def failure(self, error: ApiError) -> list[Json]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _begin_text(self) -> list[Json]:
        self._text = TextItem("in_progress")
        item = self._text.json() | {"content": []}
        return [
            self._event("response.output_item.added", output_index=len(self._output), item=item),
            self._in_text("response.content_part.added", part=self._text.part()),
        ]

    def _end_text(self, status: str) -> list[Json]:
        assert self._text is not None
        self._text.status = status
        text = self._text
        events = [
            self._in_text("response.output_text.done", text=text.text, logprobs=text.logprobs),
            self._in_text("response.content_part.done", part=text.part()),
            self._event("response.output_item.done", output_index=len(self._output), item=text.json()),
        ]
        self._output.append(text.json())
        self._text = None
        return events

    def _in_text(self, kind: str, **content: Any) -> Json:
        """An event of the only part of the item of text that is being written."""
        assert self._text is not None
        place = {"item_id": self._text.id, "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **content)

    def _event(self, kind: str, **content: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **content}

    def _described(self, entries: Sequence[TokenEntry]) -> list[Json]:
        return list(chat_logprobs(entries, self._tokenizer)["content"]) if self._logprobs else []

    def _response(self, choice: Choice, output: list[Json], status: str) -> Json:
        ended = status != "in_progress"
        return {
            **self._header,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(output),
            "usage": usage(choice.usage, choice.num_tokens) if ended else None,
            **self._asked,
        }


class TextItem:
    """A message with one part of text, while it grows."""

    def __init__(self, status: str) -> None:
        self.id = new_id("msg")
        self.status = status
        self.text = ""
        self.logprobs: list[Json] = []

    def add(self, text: str, logprobs: list[Json]) -> None:
        self.text += text
        self.logprobs += logprobs

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def json(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": [self.part()]}


def status_of(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def usage(prompt: PromptUsage | None, output_tokens: int) -> Json:
    """`cache_write_tokens` are those that the request computed, and so left to others."""
    input_tokens = prompt.prompt_tokens if prompt is not None else 0
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": prompt.cached_tokens if prompt is not None else 0,
            "cache_write_tokens": prompt.computed if prompt is not None else 0,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def echoed(body: ResponsesBody) -> Json:
    """What of the request its answer repeats, with the values that were used."""
    asked = body.model_dump(mode="json", by_alias=True)
    same = [
        *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p"),
        *("truncation", "background", "user", "safety_identifier", "prompt_cache_key"),
    ]
    return {
        **{name: asked[name] for name in same},
        "tools": asked["tools"],
        "tool_choice": asked["tool_choice"] or "auto",
        "text": {"format": asked["text"]["format"] or {"type": "text"}, "verbosity": asked["text"]["verbosity"]},
        "top_logprobs": body.top_logprobs or 0,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
    }
