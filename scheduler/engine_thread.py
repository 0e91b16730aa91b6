"""EngineThread: an Engine on its own thread, with a queue in and a callback out."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from scheduler.commands import Command, PrepareGrammar, SetVocabulary
from scheduler.config import EngineConfig
from scheduler.messages import EngineInfo, EngineStats, FinishReason, GenerationRequest, RequestOutput, StepOutput

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.guided import Guides

log = logging.getLogger("pagekv.engine")

IDLE = 1.0  # seconds; an engine with nothing to do wakes up this often to check blocks


class _Abort(str):
    """The id of a request to end."""

    __slots__ = ()


class _Stop:
    """End after what is under way."""


class EngineGone(Exception):
    """The engine has ended, and cannot answer."""


class _Call:
    """A command and the place for its answer."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.answer: Future[object] = Future()

    def run(self, engine: Engine) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(engine.command(self.command))
        except Exception as error:
            self.answer.set_exception(error)


class EngineThread:
    """Takes requests from any thread; `deliver` is called on the engine's thread after each step that said something.

    What a step said is held back until the next one's network runs, or until nothing is left to do: whoever is woken to
    read it would take the interpreter from the engine while it prepares that step. A request's first token is not.

    Requests and aborts are taken in the order they were submitted, between steps. Every request gets exactly one
    terminal output, also one that comes when the engine has ended: then it is delivered on the submitter's thread.
    """

    def __init__(self, config: EngineConfig, deliver: Callable[[StepOutput], None], *, progress: bool = True) -> None:
        self._config = config
        self._deliver = deliver
        self._progress = progress
        self._inbox: queue.SimpleQueue[GenerationRequest | _Abort | _Call | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="pagekv-engine", daemon=True)
        self._found: Callable[[str], None] = lambda path: None
        self._started: queue.SimpleQueue[EngineInfo | BaseException] = queue.SimpleQueue()
        self._ended = threading.Event()  # nobody takes from the inbox any more
        self._last_stats = EngineStats()
        self._held: StepOutput | None = None
        self._guides: Guides | None = None  # once the engine has started

    def start(self, found: Callable[[str], None] = lambda path: None) -> EngineInfo:
        """Load the model on the engine's thread and wait for it; `found` is told there where the model lies, before its
        weights are read. Raises what loading raises."""
        self._found = found
        self._thread.start()
        result = self._started.get()
        if isinstance(result, BaseException):
            self._thread.join()
            raise result
        return result

    def submit(self, request: GenerationRequest) -> None:
        """Never blocks. The request's outputs, its terminal one included, come through `deliver`."""
        self._inbox.put(request)
        if self._ended.is_set():
            self._refuse_all()

    def abort(self, request_id: str) -> None:
        """Never blocks. A request that is unknown, or has just ended, is left alone."""
        self._inbox.put(_Abort(request_id))

    def call(self, command: Command) -> Future[object]:
        """Never blocks. The command is carried out between steps, or beside them if it is about grammars; the future
        has its answer, the CommandRefused it ended in, or EngineGone if the engine ends first."""
        guides = self._guides
        if isinstance(command, SetVocabulary | PrepareGrammar) and guides is not None:
            with contextlib.suppress(RuntimeError):  # its threads have just ended
                return guides.command(command)
        call = _Call(command)
        self._inbox.put(call)
        if self._ended.is_set():
            self._refuse_all()
        return call.answer

    def stop(self) -> None:
        """End after the current step; every live request gets its terminal output. Waits for the thread."""
        self._inbox.put(_Stop())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            from scheduler.engine import Engine

            engine = Engine(self._config, progress=self._progress, found=self._found)
        except BaseException as error:
            self._ended.set()
            self._started.put(error)
            return
        self._guides = engine.guides
        self._started.put(engine.info)
        try:
            while self._take(engine):
                if engine.has_work:
                    self._step(engine)
        except BaseException:
            log.exception("the engine's thread died")
        finally:
            self._last_stats = engine.stats()
            self._ended.set()
            self._guides = None
            engine.guides.close()
            try:
                self._let_go()
                self._deliver(StepOutput(tuple(engine.abort_all()), engine.stats()))
            except BaseException:
                log.exception("the last outputs could not be delivered")
            self._refuse_all()

    def _step(self, engine: Engine) -> None:
        step = engine.step(self._let_go)
        self._let_go()  # of what came before, if nothing was computed
        self._held = step
        if not engine.has_work or any(output.time_to_first_token is not None for output in step.outputs):
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._deliver(held)

    def _refuse_all(self) -> None:
        """Nobody will take what is in the inbox: tell those who wait for an answer or an output."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Call) and item.answer.set_running_or_notify_cancel():
                    item.answer.set_exception(EngineGone("the engine has ended"))
                elif isinstance(item, GenerationRequest):
                    end = RequestOutput(item.request_id, finish_reason=FinishReason.ABORT)
                    self._deliver(StepOutput((end,), self._last_stats))

    def _take(self, engine: Engine) -> bool:
        """Take all that is in the inbox, waiting for something if there is nothing to do. False to end."""
        said: list[RequestOutput] = []
        going, changed = True, False
        while going and not (self._inbox.empty() and (engine.has_work or said or changed)):
            try:
                item = self._inbox.get(timeout=IDLE)
            except queue.Empty:
                said += engine.scrub()
                continue
            output: RequestOutput | None = None
            if isinstance(item, _Stop):
                going = False
            elif isinstance(item, _Abort):
                output = engine.abort(item)
            elif isinstance(item, _Call):
                item.run(engine)
                changed = True  # a dropped block shows in the gauges before anybody asks for anything
            else:
                output = engine.add(item)
            if output is not None:
                said.append(output)
        if said or changed:
            self._let_go()  # first, so that a request's end stays its last output
            self._deliver(StepOutput(tuple(said), engine.stats()))
        return going
