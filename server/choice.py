"""One choice of an answer: tokens in, text out, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from scheduler.messages import CacheReport, FinishReason, PromptUsage, RequestOutput, SamplingParams, TokenLogprobs
from server.detokenizer import Detokenizer
from server.echo import Echo
from server.errors import RETRY_AFTER, BadRequest, EngineFailure, Unavailable
from server.stop import StopMatcher
from server.tools.calls import Call, CallPiece, Pieces, ToolReading, collect


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token's logprobs, and where in the choice's text (characters) it begins.

    The first token of a prompt has none: nothing comes before it.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output adds to a choice: text, and parts of calls of tools. `stop_reason` is the stop string or the stop
    token that ended it; `report` comes with the end. `token_ids` may run ahead of the text, parts of which are held
    back; `num_tokens` counts all so far."""

    text: str = ""
    calls: Sequence[CallPiece] = ()
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    report: CacheReport | None = None


class Choice:
    """Collects one request's outputs; `text`, `entries` and `finish_reason` hold all that `push` returned so far.

    Tokens are counted up to the one that completed a stop string. A token that ends the request (end of sequence, or
    one of stop_token_ids) is counted, but is no text unless `include_stop`. An `echo` is the beginning of the text, and
    no stop string is looked for in it; with `echo_only` it is all of it, and what the engine must generate all the same
    is left out. With `tools`, calls of tools are taken out of the text. `first` is the first choice of the same prompt,
    which speaks for all of them of the prompt.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        *,
        echo: Echo | None = None,
        echo_only: bool = False,
        first: Choice | None = None,
        tools: ToolReading | None = None,
    ) -> None:
        self.first = first
        self.calls: list[Call] = []
        self.token_ids: list[int] = []
        self.usage: PromptUsage | None = None
        self.report: CacheReport | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.entries: list[TokenEntry] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._texts: list[str] = []
        self._chars = 0  # characters detokenized, emitted or held back
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = params.min_tokens
        self._logprobs = params.logprobs
        self._echo = echo
        self._echo_only = echo_only
        self._eos_token_ids = eos_token_ids
        self._tools = tools

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_calling(self) -> bool:
        """Whether it ended with calls that are to be made, which a last one that was cut off is not."""
        return bool(self.calls) and self.finish_reason != FinishReason.LENGTH and self.calls[-1].input is not None

    def push(self, output: RequestOutput) -> Delta:
        """Take the next output. Raises EngineFailure, Unavailable or BadRequest if it says that the request failed."""
        raise_failure(output)
        entries: list[TokenEntry] = []
        before = self.num_tokens
        text = self._open(output, entries)
        if self._echo_only:
            output = replace(output, finish_reason=FinishReason.LENGTH, stop_token_id=None)
        else:
            text += self._continue(output, entries)
        return self._emit(text, entries, self.token_ids[before:], output)

    def _open(self, output: RequestOutput, entries: list[TokenEntry]) -> str:
        """What the output with the first token says of the prompt; the text is that of an echo."""
        if output.usage is None or self.usage is not None:
            return ""
        self.usage = output.usage
        self.report = output.report
        self.prompt_logprobs = output.prompt_logprobs if self.first is None else self.first.prompt_logprobs
        echo = self._echo
        if echo is None:
            return ""
        self._chars = len(echo.text)
        if self._logprobs is not None:
            for token_id, offset, scored in zip(echo.token_ids, echo.offsets, self.prompt_logprobs, strict=True):
                found = None if scored is None else replace(scored, top=scored.top[: self._logprobs])
                entries.append(TokenEntry(token_id, found, offset))
        return echo.text

    def _continue(self, output: RequestOutput, entries: list[TokenEntry]) -> str:
        tokens = output.token_ids
        spoken = len(tokens) - self._ends_silently(output)
        if self._matcher is None and self._logprobs is None:
            self.token_ids += tokens
            texts = [self._detokenizer.push(tokens[:spoken])]
        else:
            texts = self._push_one_by_one(output, spoken, entries)
        if output.finish_reason is not None and self._stopped_at is None:
            texts.append(self._flush())
        return "".join(texts)

    def _push_one_by_one(self, output: RequestOutput, spoken: int, entries: list[TokenEntry]) -> list[str]:
        texts: list[str] = []
        for index, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            if self._logprobs is not None:
                entries.append(TokenEntry(token_id, output.logprobs[index], self._chars))
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
        ended_by_token = output.stop_token_id is not None or output.token_ids[-1] in self._eos_token_ids
        return ended_by_token and not self._include_stop

    def _emit(self, text: str, entries: list[TokenEntry], token_ids: Sequence[int], output: RequestOutput) -> Delta:
        ended = self._stopped_at is not None or output.finish_reason is not None
        pieces = Pieces(text) if self._tools is None else self._tools.read(text, is_end=ended)
        self._texts.append(pieces.content)
        collect(self.calls, pieces.calls)
        self.entries.extend(entries)
        if self._stopped_at is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, self._stopped_at
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason.value, output.stop_token_id
        if self._tools is not None and self.finish_reason == FinishReason.STOP and self.is_calling:
            self.finish_reason = self._tools.finish_reason
        report = None if self.finish_reason is None else self.report
        return Delta(
            pieces.content,
            pieces.calls,
            entries,
            token_ids,
            self.num_tokens,
            self.finish_reason,
            self.stop_reason,
            report,
        )


def raise_failure(output: RequestOutput) -> None:
    """An abort that reaches a reader is the server's doing: a client's own abort leaves no reader behind."""
    if output.unmeetable:
        raise BadRequest(f"The request cannot be met: {output.error}.", code="unmeetable_request")
    if output.busy:
        raise Unavailable(f"The server is too busy: {output.error}.", code="busy", retry_after=RETRY_AFTER)
    if output.finish_reason is FinishReason.ERROR:
        raise EngineFailure(output.error or "The engine failed this request.")
    if output.finish_reason is FinishReason.ABORT:
        raise Unavailable("The server is shutting down.", code="shutting_down")
