"""An engine with no network: the interface of EngineThread, on a thread of its own, saying what a test dictates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from scheduler.commands import Command, CommandRefused, ListAdapters
from scheduler.engine_thread import EngineGone
from scheduler.messages import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PromptUsage,
    RequestOutput,
    RequestTimes,
    StepOutput,
    TokenLogprobs,
)

EOS = 257

INFO = EngineInfo(
    model_path="/nowhere/toy",
    vocab_size=300,
    max_model_len=512,
    eos_token_ids=(EOS,),
    block_size=16,
    num_blocks=64,
    dtype="float32",
    kv_dtype="float32",
    block_bytes=4096,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    recovery="repair",
    partial_reuse=True,
    device="cpu",
    model_name="toy",
)


def say(text: str) -> Callable[[GenerationRequest], Sequence[int]]:
    """Every request is answered with `text`, then EOS."""
    return lambda _: [*text.encode(), EOS]


HELLO = say("hello")


def refuse(command: Command) -> object:
    if isinstance(command, ListAdapters):
        return ()
    raise CommandRefused(f"a fake engine does not know {type(command).__name__}", "adapter")


@dataclass
class Running:
    request: GenerationRequest
    tokens: Sequence[int]
    arrived: float = field(default_factory=time.monotonic)
    sent: int = 0


class FakeEngine:
    """One token per request and step, `interval` seconds apart. The first half of each prompt counts as cached.

    `script` gives a request's tokens (EOS ends it; running out of them repeats the last); `fail_at` makes the step that
    would give a request that many tokens fail it; `answer` gives the answer to each command; `die` ends the thread
    without a word, as a fatal error would.
    """

    def __init__(
        self,
        deliver: Callable[[StepOutput], None],
        script: Callable[[GenerationRequest], Sequence[int]] = HELLO,
        *,
        interval: float = 0.0,
        fail_at: Callable[[GenerationRequest], int | None] = lambda _: None,
        info: EngineInfo = INFO,
        answer: Callable[[Command], object] = refuse,
    ) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        self.script = script
        self.interval = interval
        self.fail_at = fail_at
        self.info = info
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.terminal: list[tuple[str, FinishReason]] = []
        self.stats = EngineStats(blocks_total=info.num_blocks)
        self._deliver = deliver
        self._wake = threading.Condition()
        self._arrivals: list[GenerationRequest] = []
        self._aborts: list[str] = []
        self._running: dict[str, Running] = {}
        self._stop = False
        self._die = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)

    def start(self, found: Callable[[str], None] = lambda path: None) -> EngineInfo:
        found(self.info.model_path)
        self._thread.start()
        return self.info

    def submit(self, request: GenerationRequest) -> None:
        with self._wake:
            self.submitted.append(request)
            self._arrivals.append(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self.aborted.append(request_id)
            self._aborts.append(request_id)
            self._wake.notify()

    def call(self, command: Command) -> Future[object]:
        future: Future[object] = Future()
        self.commands.append(command)
        try:
            if not self.alive:
                raise EngineGone
            future.set_result(self.answer(command))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def die(self) -> None:
        with self._wake:
            self._die = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._stop or self._die or self._arrivals or self._aborts or self._running):
                    self._wake.wait()
                arrivals, self._arrivals = self._arrivals, []
                aborts, self._aborts = self._aborts, []
                stop, die = self._stop, self._die
            if die:
                return
            for request in arrivals:
                self._running[request.request_id] = Running(request, self.script(request))
            leaving = list(self._running) if stop else aborts
            outputs = [self._end(self._running[each], FinishReason.ABORT) for each in leaving if each in self._running]
            outputs += [self._advance(running) for running in list(self._running.values())]
            self._count(outputs)
            self._deliver(StepOutput(tuple(outputs), self.stats))
            if stop:
                return
            time.sleep(self.interval)

    def _advance(self, running: Running) -> RequestOutput:
        request, index = running.request, running.sent
        if self.fail_at(request) == index:
            return self._end(running, FinishReason.ERROR, error="the step failed: told to")
        token = running.tokens[min(index, len(running.tokens) - 1)]
        running.sent += 1
        now = time.monotonic()
        first = index == 0
        output = RequestOutput(
            request.request_id,
            (token,),
            logprobs=self._logprobs(request.params.logprobs, (token,)),
            prompt_logprobs=self._scored(request) if first else (),
            usage=self._usage(request) if first else None,
            time_to_first_token=now - running.arrived if first else None,
            inter_token=None if first else max(self.interval, 1e-6),
            num_generated=running.sent,
        )
        params = request.params
        if token in params.stop_token_ids and running.sent > params.min_tokens:
            return self._end(running, FinishReason.STOP, output, stop_token_id=token)
        if token == EOS and not params.ignore_eos and running.sent > params.min_tokens:
            return self._end(running, FinishReason.STOP, output)
        if running.sent >= params.max_tokens:
            return self._end(running, FinishReason.LENGTH, output)
        return output

    def _end(
        self,
        running: Running,
        reason: FinishReason,
        output: RequestOutput | None = None,
        *,
        error: str | None = None,
        stop_token_id: int | None = None,
    ) -> RequestOutput:
        request_id = running.request.request_id
        del self._running[request_id]
        self.terminal.append((request_id, reason))
        took = time.monotonic() - running.arrived
        return replace(
            output or RequestOutput(request_id, num_generated=running.sent),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            times=RequestTimes(0.0, took / 2, took / 2, took, took),
        )

    def _logprobs(self, wanted: int | None, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """The chosen token has rank 1 and -0.5; the alternatives are the ids after it."""
        if wanted is None:
            return ()
        return tuple(
            TokenLogprobs(token, -0.5, 1, tuple(((token + step) % 256, -0.5 - step) for step in range(wanted)))
            for token in tokens
        )

    def _scored(self, request: GenerationRequest) -> tuple[TokenLogprobs | None, ...]:
        wanted = request.params.prompt_logprobs
        return () if wanted is None else (None, *self._logprobs(wanted, request.prompt_token_ids[1:]))

    def _usage(self, request: GenerationRequest) -> PromptUsage:
        total = len(request.prompt_token_ids)
        return PromptUsage(total, reused=total // 2, copied=0, pending=0, computed=total - total // 2)

    def _count(self, outputs: Sequence[RequestOutput]) -> None:
        usages = [output.usage for output in outputs if output.usage is not None]
        stats = self.stats
        self.stats = replace(
            stats,
            running=len(self._running),
            blocks_in_use=len(self._running),
            prompt_tokens=stats.prompt_tokens + sum(usage.prompt_tokens for usage in usages),
            prompt_tokens_reused=stats.prompt_tokens_reused + sum(usage.reused for usage in usages),
            prompt_tokens_computed=stats.prompt_tokens_computed + sum(usage.computed for usage in usages),
            generation_tokens=stats.generation_tokens + sum(len(output.token_ids) for output in outputs),
            steps=stats.steps + 1,
            step_tokens=sum(usage.computed for usage in usages) + len(outputs) - len(usages),
        )
