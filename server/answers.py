"""Answers in OpenAI's shapes: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from scheduler.messages import CacheReport
from server.choice import Choice, Delta, TokenEntry
from server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from server.protocol import GenerationBody
from server.reports import report_json
from server.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Extras:
    """What an answer tells besides its text. `stream_usage` and `report` come with the last chunk of a stream."""

    logprobs: bool = False
    prompt_logprobs: int | None = None  # alternatives per token
    stream_usage: bool = False
    report: bool = False

    @classmethod
    def of(cls, body: GenerationBody) -> Self:
        return cls(body.logprobs_wanted is not None, body.prompt_logprobs, body.include_usage, body.cache_report)

    def reported(self, report: CacheReport | None) -> Json:
        return {"cache_report": report_json(report)} if self.report and report is not None else {}


class Format(Protocol):
    """One kind of answer. `id` names the answer and begins the ids of its requests."""

    id: str

    def whole(self, choices: Sequence[Choice]) -> Json: ...
    def opening(self, num_choices: int) -> list[Json]: ...
    def chunks(self, index: int, delta: Delta) -> list[Json]: ...
    def closing(self, choices: Sequence[Choice]) -> list[Json]: ...


class CompletionFormat:
    def __init__(self, model: str, tokenizer: Tokenizer, extras: Extras) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._header: Json = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._extras = extras

    def whole(self, choices: Sequence[Choice]) -> Json:
        made = [
            self._choice(index, choice.text, choice.entries, choice.finish_reason, choice.stop_reason)
            | scored_prompt(choice, self._tokenizer, self._extras)
            for index, choice in enumerate(choices)
        ]
        return {
            **self._header,
            "choices": made,
            "usage": usage(choices),
            **self._extras.reported(choices[0].report),
        }

    def opening(self, num_choices: int) -> list[Json]:
        return []

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Text goes ahead of the end, which is a chunk of its own."""
        made = []
        if delta.text or delta.entries:
            made.append(self._chunk(self._choice(index, delta.text, delta.entries, None, None)))
        if delta.finish_reason is not None:
            made.append(self._chunk(self._choice(index, "", [], delta.finish_reason, delta.stop_reason)))
            if not self._extras.stream_usage:
                made[-1] |= self._extras.reported(delta.report)
        return made

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        return closing(self._header, choices, self._extras)

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._header, "choices": [choice]}
        if self._extras.stream_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenEntry],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> Json:
        wanted = self._extras.logprobs and (entries or finish_reason is None)
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(entries, self._tokenizer) if wanted else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class ChatFormat:
    def __init__(self, model: str, tokenizer: Tokenizer, extras: Extras) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._header: Json = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._extras = extras

    def whole(self, choices: Sequence[Choice]) -> Json:
        made = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            made.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._chat_logprobs(choice.entries),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
            )
        return {
            **self._header,
            "object": "chat.completion",
            "choices": made,
            "usage": usage(choices),
            **scored_prompt(choices[0], self._tokenizer, self._extras),
            **self._extras.reported(choices[0].report),
        }

    def opening(self, num_choices: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        made = []
        if delta.text or delta.entries:
            made.append(self._chunk(index, {"content": delta.text}, self._chat_logprobs(delta.entries)))
        if delta.finish_reason is not None:
            last = self._chunk(index, {})
            last["choices"][0] |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            if not self._extras.stream_usage:
                last |= self._extras.reported(delta.report)
            made.append(last)
        return made

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        return closing({**self._header, "object": "chat.completion.chunk"}, choices, self._extras)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._header, "object": "chat.completion.chunk", "choices": [choice]}
        if self._extras.stream_usage:
            chunk["usage"] = None
        return chunk

    def _chat_logprobs(self, entries: Sequence[TokenEntry]) -> Json | None:
        return chat_logprobs(entries, self._tokenizer) if self._extras.logprobs else None


def scored_prompt(choice: Choice, tokenizer: Tokenizer, extras: Extras) -> Json:
    if extras.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(choice.prompt_logprobs, tokenizer, extras.prompt_logprobs)}


def closing(header: Json, choices: Sequence[Choice], extras: Extras) -> list[Json]:
    """The chunk after the last one of each choice, for those who asked for usage."""
    if not extras.stream_usage:
        return []
    return [{**header, "choices": [], "usage": usage(choices), **extras.reported(choices[0].report)}]


def usage(choices: Sequence[Choice]) -> Json:
    """Tokens of all choices together. `cached_tokens` are those of the prompts that were not computed for them."""
    prompts = [choice.usage for choice in choices if choice.usage is not None]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)},
    }
