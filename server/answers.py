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
from server.prepare import Prepared
from server.protocol import GenerationBody
from server.reports import report_json
from server.tokenizer import Tokenizer
from server.tools.calls import Call, CallPiece

Json = dict[str, Any]

# Keys of a whole answer that are there in vLLM and OpenAI whether or not there is something to say.
UNSAID: Json = {"system_fingerprint": None, "service_tier": None, "kv_transfer_params": None}
NO_IDS: Json = {"token_ids": None}


@dataclass(frozen=True, slots=True)
class Extras:
    """What an answer tells besides its text. `stream_usage` and `report` come with the last chunk of a stream.

    `prompts` are the token ids of each prompt, which has `n` choices one after the other; `request_id` is the client's.
    """

    logprobs: bool = False
    prompt_logprobs: int | None = None  # alternatives per token
    stream_usage: bool = False
    report: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    request_id: str | None = None
    prompts: tuple[tuple[int, ...], ...] = ()
    n: int = 1

    @classmethod
    def of(cls, body: GenerationBody, prepared: Sequence[Prepared] = ()) -> Self:
        return cls(
            logprobs=body.logprobs_wanted is not None,
            prompt_logprobs=body.prompt_logprobs,
            stream_usage=body.include_usage,
            report=body.cache_report,
            continuous_usage=body.continuous_usage,
            token_ids=body.return_token_ids,
            tokens_as_ids=body.return_tokens_as_token_ids,
            request_id=body.request_id,
            prompts=tuple(each.prompt.token_ids for each in prepared),
            n=body.n,
        )

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """The token ids that choice `index` goes on from."""
        return self.prompts[index // self.n]

    def answer_id(self, kind: str) -> str:
        return f"{kind}-{self.request_id or uuid.uuid4().hex}"

    def chunk_usage(self, index: int, num_tokens: int) -> Json:
        """`usage` of a chunk, which has that field only for those who asked: None, or that of its choice so far."""
        if self.continuous_usage:
            return {"usage": usage_of(len(self.prompt_of(index)), num_tokens)}
        return {"usage": None} if self.stream_usage else {}

    def reported(self, report: CacheReport | None) -> Json:
        return {"cache_report": report_json(report)} if self.report and report is not None else {}


class Format(Protocol):
    """One kind of answer. `id` names the answer and begins the ids of its requests."""

    id: str

    def whole(self, choices: Sequence[Choice]) -> Json: ...
    def opening(self, choices: Sequence[Choice]) -> list[Json]: ...
    def chunks(self, index: int, delta: Delta) -> list[Json]: ...
    def closing(self, choices: Sequence[Choice]) -> list[Json]: ...


class CompletionFormat:
    def __init__(self, model: str, tokenizer: Tokenizer, extras: Extras) -> None:
        self.id = extras.answer_id("cmpl")
        self._header: Json = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._extras = extras

    def whole(self, choices: Sequence[Choice]) -> Json:
        made = [
            self._choice(index, choice.text, choice.entries, choice.finish_reason, choice.stop_reason)
            | self._ids(index, choice.token_ids, first=True)
            | scored_prompt(choice, self._tokenizer, self._extras)
            for index, choice in enumerate(choices)
        ]
        return {
            **self._header,
            **UNSAID,
            "choices": [NO_IDS | {"prompt_token_ids": None, "prompt_logprobs": None} | each for each in made],
            "usage": usage(choices),
            **self._extras.reported(choices[0].report),
        }

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        return []

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Text goes ahead of the end, which is a chunk of its own."""
        made = []
        if delta.text or delta.entries or (self._extras.token_ids and delta.token_ids):
            choice = self._choice(index, delta.text, delta.entries, None, None)
            first = delta.num_tokens == len(delta.token_ids)
            made.append(self._chunk(choice | self._ids(index, delta.token_ids, first=first), delta))
        if delta.finish_reason is not None:
            choice = self._choice(index, "", [], delta.finish_reason, delta.stop_reason)
            made.append(self._chunk(choice | self._ids(index, (), first=False), delta))
            if not self._extras.stream_usage:
                made[-1] |= self._extras.reported(delta.report)
        return made

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        return closing(self._header, choices, self._extras)

    def _chunk(self, choice: Json, delta: Delta) -> Json:
        return {
            **self._header,
            "choices": [choice],
            **self._extras.chunk_usage(choice["index"], delta.num_tokens),
        }

    def _ids(self, index: int, token_ids: Sequence[int], *, first: bool) -> Json:
        """vLLM's: the prompt's ids with the first of a choice, its own with each."""
        if not self._extras.token_ids:
            return {}
        return {"prompt_token_ids": self._extras.prompt_of(index) if first else None, "token_ids": token_ids}

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
            "logprobs": self._logprobs(entries) if wanted else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Json:
        return completion_logprobs(entries, self._tokenizer, as_ids=self._extras.tokens_as_ids)


class ChatFormat:
    def __init__(self, model: str, tokenizer: Tokenizer, extras: Extras) -> None:
        self.id = extras.answer_id("chatcmpl")
        self._header: Json = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._extras = extras

    def whole(self, choices: Sequence[Choice]) -> Json:
        made = []
        for index, choice in enumerate(choices):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [call_json(call) for call in choice.calls]}
            made.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._chat_logprobs(choice.entries),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **self._ids(choice.token_ids),
                }
            )
        return {
            **self._header,
            **UNSAID,
            "object": "chat.completion",
            "choices": [NO_IDS | each for each in made],
            "usage": usage(choices),
            "prompt_token_ids": None,
            "prompt_logprobs": None,
            **self._prompt_ids(),
            **scored_prompt(choices[0], self._tokenizer, self._extras),
            **self._extras.reported(choices[0].report),
        }

    def opening(self, choices: Sequence[Choice]) -> list[Json]:
        opening = Delta(num_tokens=0)
        said = {"role": "assistant", "content": ""}
        return [self._chunk(index, said, opening) | self._prompt_ids() for index in range(len(choices))]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        made = []
        parts: list[Json] = [{"tool_calls": [piece_json(piece)]} for piece in delta.calls]
        if delta.text or (not parts and (delta.entries or (self._extras.token_ids and delta.token_ids))):
            parts.insert(0, {"content": delta.text})
        for number, said in enumerate(parts):  # what comes with tokens comes with the first
            logprobs = self._chat_logprobs(() if number else delta.entries)
            made.append(self._chunk(index, said, delta, logprobs))
            made[-1]["choices"][0] |= self._ids(() if number else delta.token_ids)
        if delta.finish_reason is not None:
            last = self._chunk(index, {}, delta)
            last["choices"][0] |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            last["choices"][0] |= self._ids(())
            if not self._extras.stream_usage:
                last |= self._extras.reported(delta.report)
            made.append(last)
        return made

    def closing(self, choices: Sequence[Choice]) -> list[Json]:
        return closing({**self._header, "object": "chat.completion.chunk"}, choices, self._extras)

    def _chunk(self, index: int, said: Json, delta: Delta, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": None}
        return {
            **self._header,
            "object": "chat.completion.chunk",
            "choices": [choice],
            **self._extras.chunk_usage(index, delta.num_tokens),
        }

    def _ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": token_ids} if self._extras.token_ids else {}

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._extras.prompt_of(0)} if self._extras.token_ids else {}

    def _chat_logprobs(self, entries: Sequence[TokenEntry]) -> Json | None:
        if not self._extras.logprobs:
            return None
        return chat_logprobs(entries, self._tokenizer, as_ids=self._extras.tokens_as_ids)


def call_json(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def piece_json(piece: CallPiece) -> Json:
    """Of a stream: id and name come with a call's first piece alone."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


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
    """Tokens of all choices together, and of each prompt once: its first choice speaks for it. `cached_tokens` are
    those of the prompts that were not computed for them."""
    prompts = [choice.usage for choice in choices if choice.usage is not None and choice.first is None]
    counted = usage_of(sum(prompt.prompt_tokens for prompt in prompts), sum(choice.num_tokens for choice in choices))
    return counted | {"prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)}}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
