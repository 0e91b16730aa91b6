"""The bridge between the engine's thread and the event loop.

    event loop                                        engine thread
    generate(requests)  -- submit, abort ---------->  EngineThread
    OutputStream        <- one wake-up per drain ---  deliver(StepOutput)

A stream may cover several requests (the prompts of one body); it yields `(index, output)`. What arrives while its
reader is busy is merged, so that a slow client costs one pending output per request, not one per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from scheduler.commands import Command, CommandRefused
from scheduler.engine_thread import EngineGone
from scheduler.messages import EngineInfo, FinishReason, GenerationRequest, RequestOutput, StepOutput, TokenLogprobs
from server.errors import BadRequest, EngineFailure, Unavailable

LIVENESS_INTERVAL = 0.5  # seconds between looks at the engine's thread
DEAD = "The engine has died; the server must be restarted."
STOPPING = "The server is shutting down."

Answer = TypeVar("Answer")


class EngineLike(Protocol):
    """What the server asks of an engine: scheduler.engine_thread.EngineThread, or another process one day."""

    def start(self, found: Callable[[str], None] = ...) -> EngineInfo: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def call(self, command: Command) -> Future[object]: ...
    def stop(self) -> None: ...
    @property
    def alive(self) -> bool: ...


class Observer(Protocol):
    """Sees every step and every request's end, on the event loop."""

    def step(self, step: StepOutput) -> None: ...
    def finished(self, request: GenerationRequest, output: RequestOutput, reason: FinishReason) -> None: ...


EngineFactory = Callable[[Callable[[StepOutput], None]], EngineLike]


class AsyncEngine:
    """Runs one engine for one event loop.

    `start` loads the model and blocks; `attach` is called once on the event loop, before the first `generate`.
    """

    def __init__(self, make_engine: EngineFactory, observer: Observer | None = None) -> None:
        self.observer = observer
        self._engine = make_engine(self._deliver)
        self._live: dict[str, _Live] = {}
        self._steps: deque[StepOutput] = deque()
        self._wake_lock = threading.Lock()
        self._wake_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self, found: Callable[[str], None] = lambda path: None) -> EngineInfo:
        """Load the model. `found` is told where it lies, before that takes its time, maybe on another thread. Raises
        what loading raises."""
        return self._engine.start(found)

    def call(self, command: Command, kind: type[Answer]) -> Answer:
        """The answer to a command, for when there is no event loop yet. Blocks. Raises CommandRefused, EngineGone."""
        return expect(self._engine.call(command).result(), kind)

    def attach(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = self._loop.create_task(self._watch_engine())

    async def stop(self) -> None:
        """End every stream, then the engine. Idempotent. New requests are refused from now on."""
        if self._stopping:
            return
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._engine.stop)
        self._drain()
        self._fail_all("The engine has stopped.", FinishReason.ABORT)
        self._loop = None

    def stop_now(self) -> None:
        """Stop an engine whose event loop is gone, or never was. Idempotent; blocks until its step has ended."""
        if not self._stopping:
            self._stopping = True
            self._engine.stop()

    @property
    def alive(self) -> bool:
        return self._engine.alive and not self._stopping

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def num_live(self) -> int:
        """Requests whose terminal event has not come yet, closed streams' included."""
        return len(self._live)

    def generate(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Submit all requests (their ids must be new) and stream their outputs. Raises Unavailable and EngineFailure.

        The stream must be closed (`with`, or `close()`): that aborts whatever has not ended.
        """
        if self._stopping:
            raise Unavailable(STOPPING, code="shutting_down")
        if not self._engine.alive:
            raise EngineFailure(DEAD)
        stream = OutputStream(self, len(requests))
        try:
            for index, request in enumerate(requests):
                self._live[request.request_id] = _Live(request, stream, index)
                stream.request_ids.append(request.request_id)
                self._engine.submit(request)
        except BaseException:
            stream.close()
            raise
        return stream

    async def command(self, command: Command, kind: type[Answer]) -> Answer:
        """The engine's answer, which is of `kind`, from between two of its steps.

        Raises BadRequest when it refuses, EngineBusy when it has no time for it, and Unavailable or EngineFailure when
        there is no engine to ask.
        """
        try:
            if self._stopping:
                raise EngineGone
            return expect(await asyncio.wrap_future(self._engine.call(command)), kind)
        except CommandRefused as error:
            raise BadRequest(sentence(str(error)), param=error.param, code="invalid_value") from None
        except EngineGone:
            if self._stopping:
                raise Unavailable(STOPPING, code="shutting_down") from None
            raise EngineFailure(DEAD) from None

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early; `reason` is what its end is counted as. Unknown and ended ids are ignored."""
        live = self._live.get(request_id)
        if live is not None and live.end_as is None:
            live.end_as = reason
            self._engine.abort(request_id)

    def _deliver(self, step: StepOutput) -> None:
        """On the engine's thread: at most one wake-up is on its way to the loop at any time."""
        self._steps.append(step)
        with self._wake_lock:
            loop = self._loop
            if self._wake_due or loop is None:
                return
            self._wake_due = True
        with contextlib.suppress(RuntimeError):  # the loop closed while the engine was finishing its step
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._wake_lock:
            self._wake_due = False
        while self._steps:
            step = self._steps.popleft()
            if self.observer is not None:
                self.observer.step(step)
            for output in step.outputs:
                self._route(output)

    def _route(self, output: RequestOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        if output.finish_reason is FinishReason.ABORT and live.end_as is None and not self._stopping:
            output = replace(output, finish_reason=FinishReason.ERROR, error=DEAD)  # nobody asked for its end
        if output.finish_reason is not None:
            del self._live[output.request_id]
            if self.observer is not None:
                self.observer.finished(live.request, output, live.end_as or output.finish_reason)
        live.stream.push(live.index, output)

    async def _watch_engine(self) -> None:
        """A dead thread delivers nothing more; its streams must end with an error, not hang."""
        while self._engine.alive:
            await asyncio.sleep(LIVENESS_INTERVAL)
        self._drain()
        self._fail_all(DEAD, FinishReason.ERROR)

    def _fail_all(self, message: str, reason: FinishReason) -> None:
        for request_id in list(self._live):
            self._route(RequestOutput(request_id, finish_reason=reason, error=message))


def expect(answer: object, kind: type[Answer]) -> Answer:
    if not isinstance(answer, kind):
        raise TypeError(f"the engine answered with {type(answer).__name__} where {kind.__name__} was due")
    return answer


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


class _Live:
    """A request that the engine has not ended yet."""

    __slots__ = ("end_as", "index", "request", "stream")

    def __init__(self, request: GenerationRequest, stream: OutputStream, index: int) -> None:
        self.request = request
        self.stream = stream
        self.index = index
        self.end_as: FinishReason | None = None


class OutputStream:
    """Outputs of one or more requests as `(index, RequestOutput)`; ends after the terminal output of each.

    Leaving the `with` block, or `close()`, aborts what has not ended. After `finish(index)` nothing more comes for
    that request.
    """

    def __init__(self, engine: AsyncEngine, size: int) -> None:
        self.request_ids: list[str] = []
        self._engine = engine
        self._open = set(range(size))  # indices whose terminal output has not been read
        self._pending: dict[int, _Pending] = {}
        self._failures: dict[int, RequestOutput] = {}  # come after what is pending: tokens that were made are read
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while self._open:
            if self._pending:
                index = next(iter(self._pending))
                output = self._pending.pop(index).merged()
                if output.finish_reason is not None:
                    self._open.discard(index)
                return index, output
            if self._failures:
                index, output = self._failures.popitem()
                self._open.discard(index)
                return index, output
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise StopAsyncIteration

    def push(self, index: int, output: RequestOutput) -> None:
        if index not in self._open:
            return
        pending = self._pending.get(index)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._failures[index] = output
        elif pending is None:
            self._pending[index] = _Pending(output)
        else:
            pending.add(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self, index: int) -> None:
        """The server has all it wants of this request: a stop string was found in its text."""
        self._leave(index, FinishReason.STOP)

    def close(self) -> None:
        for index in list(self._open):
            self._leave(index, FinishReason.ABORT)

    def _leave(self, index: int, reason: FinishReason) -> None:
        self._open.discard(index)
        self._pending.pop(index, None)
        self._failures.pop(index, None)
        if index < len(self.request_ids):
            self._engine.abort(self.request_ids[index], reason)


class _Pending:
    """Outputs of one request that its reader has not taken yet; lists grow in place, one object per request."""

    __slots__ = ("first", "last", "logprobs", "opening", "token_ids")

    def __init__(self, output: RequestOutput) -> None:
        self.first = output
        self.last = output
        self.opening = output  # what comes with the first token is taken from it
        self.token_ids = list(output.token_ids)
        self.logprobs: list[TokenLogprobs] = list(output.logprobs)

    def add(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if self.opening.usage is None:
            self.opening = output
        self.last = output

    def merged(self) -> RequestOutput:
        if self.last is self.first:
            return self.first
        opening, last = self.opening, self.last
        return RequestOutput(
            request_id=last.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=opening.prompt_logprobs,
            usage=opening.usage,
            report=opening.report,
            time_to_first_token=opening.time_to_first_token,
            inter_token=last.inter_token,
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            error=last.error,
            times=last.times,
            num_generated=last.num_generated,
        )
