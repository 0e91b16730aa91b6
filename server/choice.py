"""One choice of an answer: tokens in, text out, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from scheduler.messages import FinishReason, PromptUsage, RequestOutput, SamplingParams, TokenLogprobs
from server.detokenizer import Detokenizer
from server.errors import EngineFailure, Unavailable
from server.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token's logprobs, and where in the choice's text (characters) it begins."""

    logprobs: TokenLogprobs
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output adds to a choice. `stop_reason` is the stop string or the stop token that ended it."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """Collects one request's outputs; `text`, `entries` and `finish_reason` hold all that `push` returned so far.

    Tokens are counted up to the one that completed a stop string. A token that ends the request (end of sequence, or
    one of stop_token_ids) is counted, but is no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.usage: PromptUsage | None = None
        self.entries: list[TokenEntry] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._texts: list[str] = []
        self._chars = 0  # characters detokenized, emitted or held back
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = params.min_tokens
        self._wants_logprobs = params.logprobs is not None
        self._eos_token_ids = eos_token_ids

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, output: RequestOutput) -> Delta:
        """Take the next output. Raises EngineFailure or Unavailable when it says that the request failed."""
        raise_failure(output)
        self.usage = self.usage or output.usage
        tokens = output.token_ids
        spoken = len(tokens) - self._ends_silently(output)
        entries: list[TokenEntry] = []
        if self._matcher is None and not self._wants_logprobs:
            self.num_tokens += len(tokens)
            texts = [self._detokenizer.push(tokens[:spoken])]
        else:
            texts = self._push_one_by_one(output, spoken, entries)
        if output.finish_reason is not None and self._stopped_at is None:
            texts.append(self._flush())
        return self._emit("".join(texts), entries, output)

    def _push_one_by_one(self, output: RequestOutput, spoken: int, entries: list[TokenEntry]) -> list[str]:
        texts: list[str] = []
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self._wants_logprobs:
                entries.append(TokenEntry(output.logprobs[index], self._chars))
            text = self._detokenizer.push((token_id,)) if index < spoken else ""
            self._chars += len(text)
            texts.append(self._match(text))
            if self._stopped_at is not None:
                break
        return texts

    def _match(self, text: str) -> str:
        if self._matcher is None or self.num_tokens < self._min_tokens:
            return text
        return self._matcher.push(text)

    def _flush(self) -> str:
        """What was held back in case it became half a character or a stop string, now that nothing more comes."""
        text = self._match(self._detokenizer.finish())
        if self._matcher is not None and self._stopped_at is None:
            text += self._matcher.finish()
        return text

    @property
    def _stopped_at(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _ends_silently(self, output: RequestOutput) -> bool:
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return False
        if output.stop_token_id is not None:
            return not self._include_stop
        return output.token_ids[-1] in self._eos_token_ids

    def _emit(self, text: str, entries: list[TokenEntry], output: RequestOutput) -> Delta:
        self._texts.append(text)
        self.entries.extend(entries)
        if self._stopped_at is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, self._stopped_at
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason.value, output.stop_token_id
        return Delta(text, entries, self.finish_reason, self.stop_reason)


def raise_failure(output: RequestOutput) -> None:
    """An abort that reaches a reader is the server's doing: a client's own abort leaves no reader behind."""
    if output.finish_reason is FinishReason.ERROR:
        raise EngineFailure(output.error or "The engine failed this request.")
    if output.finish_reason is FinishReason.ABORT:
        raise Unavailable("The server is shutting down.", code="shutting_down")
