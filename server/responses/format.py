"""Answers in the shape of OpenAI's Responses API: a response, or the events of one.

response.created, response.in_progress
per item of output:  response.output_item.added, what the item is made of, response.output_item.done
response.completed, or response.incomplete where max_output_tokens ended it
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scheduler.messages import PromptUsage
from scheduler.sampling_defaults import SamplingDefaults
from server.choice import Choice, Delta, TokenEntry
from server.errors import ApiError
from server.logprobs import chat_logprobs
from server.responses.body import ResponsesBody
from server.responses.items import CallItem, TextItem, new_id
from server.sampling import with_defaults
from server.tokenizer import Tokenizer
from server.tools.calls import Call, CallPiece
from server.wire import NamedWire

Json = dict[str, Any]


class ResponsesFormat(NamedWire):
    def __init__(self, model: str, body: ResponsesBody, tokenizer: Tokenizer, sampling: SamplingDefaults) -> None:
        """`sampling` are the values of a body that leaves them out."""
        self.id = new_id("resp")
        self._tokenizer = tokenizer
        self._logprobs = body.has_logprobs
        self._header: Json = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._asked = echoed(body, sampling)
        self._output: list[Json] = []  # items that are complete
        self._item: TextItem | CallItem | None = None  # the one that is being written
        self._sequence = 0

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        status = status_of(choice.finish_reason)
        items: list[TextItem | CallItem] = []
        if choice.text or not choice.calls:
            text = TextItem()
            text.add(choice.text, self._described(choice.entries))
            items.append(text)
        items += [CallItem(call) for call in choice.calls]
        output = [item.json("completed") for item in items[:-1]] + [items[-1].json(last_status(items[-1], status))]
        return self._response(choice, output, status)

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        return [
            self._event("response.created", response=self._response(choice, [], "in_progress")),
            self._event("response.in_progress", response=self._response(choice, [], "in_progress")),
        ]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Logprobs of a call's tokens are told nowhere: they are of no text."""
        events: list[Json] = []
        if delta.text or (delta.entries and isinstance(self._item, TextItem) and not delta.calls):
            events += self._say(delta.text, self._described(delta.entries))
        for piece in delta.calls:
            events += self._call(piece)
        return events

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        (choice,) = choices
        status = status_of(choice.finish_reason)
        events = [] if self._item is not None or self._output else self._begin(TextItem())
        events += self._end(status if self._item is None else last_status(self._item, status))
        response = self._response(choice, self._output, status)
        return [*events, self._event(f"response.{status}", response=response)]

    def failure(self, error: ApiError) -> list[Json]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _say(self, text: str, logprobs: list[Json]) -> list[Json]:
        events = [] if isinstance(self._item, TextItem) else self._begin(TextItem())
        assert isinstance(self._item, TextItem)
        self._item.add(text, logprobs)
        return [*events, self._in_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _call(self, piece: CallPiece) -> list[Json]:
        events = []
        if piece.id is not None:
            events += self._begin(CallItem(Call(piece.id, piece.name or "", "")))
        assert isinstance(self._item, CallItem)
        if piece.arguments:
            self._item.call.arguments += piece.arguments
            events.append(self._in_item("response.function_call_arguments.delta", delta=piece.arguments))
        return events

    def _begin(self, item: TextItem | CallItem) -> list[Json]:
        events = self._end("completed")
        self._item = item
        place = len(self._output)
        events.append(self._event("response.output_item.added", output_index=place, item=item.json("in_progress")))
        if isinstance(item, TextItem):
            events.append(self._in_part("response.content_part.added", part=item.part()))
        return events

    def _end(self, status: str) -> list[Json]:
        item = self._item
        if item is None:
            return []
        if isinstance(item, TextItem):
            events = [
                self._in_part("response.output_text.done", text=item.text, logprobs=item.logprobs),
                self._in_part("response.content_part.done", part=item.part()),
            ]
        else:
            said = {"name": item.call.name, "arguments": item.call.arguments}
            events = [self._in_item("response.function_call_arguments.done", **said)]
        done = item.json(status)
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=done))
        self._output.append(done)
        self._item = None
        return events

    def _in_part(self, kind: str, **content: Any) -> Json:
        """An event of the only part of the message that is being written."""
        return self._in_item(kind, content_index=0, **content)

    def _in_item(self, kind: str, **content: Any) -> Json:
        assert self._item is not None
        return self._event(kind, item_id=self._item.id, output_index=len(self._output), **content)

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


def status_of(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def last_status(item: TextItem | CallItem, status: str) -> str:
    """A call whose arguments are whole was finished before the answer was cut."""
    return "completed" if isinstance(item, CallItem) and item.call.input is not None else status


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


def echoed(body: ResponsesBody, sampling: SamplingDefaults) -> Json:
    """What of the request its answer repeats, with the values that were used."""
    asked = body.model_dump(mode="json", by_alias=True)
    used = with_defaults(body, sampling)
    same = [
        *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
        *("truncation", "background", "user", "safety_identifier", "prompt_cache_key"),
    ]
    return {
        **{name: asked[name] for name in same},
        "temperature": used.temperature,
        "top_p": used.top_p,
        "tools": asked["tools"],
        "tool_choice": asked["tool_choice"] or "auto",
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "text": {"format": asked["text"]["format"] or {"type": "text"}, "verbosity": asked["text"]["verbosity"]},
        "top_logprobs": body.top_logprobs or 0,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
    }
