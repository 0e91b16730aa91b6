"""The masks of one step: which tokens the grammars of its guided rows allow next.

llguidance counts the work of a mask, and ends one that takes too much; what is bounded here is what it does not count.
Work is counted in processor time: on a crowded machine a mask of a millisecond may take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.commands import EngineBusy
from scheduler.grammars import GrammarFault
from scheduler.machine import thread_clock

PATIENCE = 10.0
"""Seconds that a step waits for a mask that gets no processor; then the mask's request fails, and only it."""
MAX_WORK = 1.0  # seconds of processor time for one mask
GLANCE = 0.1  # seconds between looks at the work of a mask that is waited for
HELP_AFTER = 1.0  # seconds after which the step computes a mask that no thread has come to, for the others' sake

TokenMask = NDArray[np.int32]


@dataclass(slots=True)
class StepMasks:
    """The outcome of a step's guided rows, by request id: a mask, a fault of the grammar's, or that this machine had no
    time for it."""

    masks: dict[str, TokenMask] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)


class MaskWork:
    """One row's mask while a thread computes it, and the processor time that it takes."""

    def __init__(self, request_id: str, compute: Callable[[], TokenMask]) -> None:
        self.request_id = request_id
        self._compute = compute
        self._clock: Callable[[], float] | None = None  # once a thread has come to it
        self._began = 0.0

    def __call__(self) -> TokenMask:
        clock = thread_clock()
        self._began, self._clock = clock(), clock
        return self._compute()

    @property
    def has_begun(self) -> bool:
        return self._clock is not None

    @property
    def seconds(self) -> float:
        """Processor time so far. Any thread, while the computing one lives."""
        return 0.0 if self._clock is None else self._clock() - self._began


class PendingMasks:
    """Masks that are being computed while the network runs."""

    def __init__(self, rows: list[tuple[MaskWork, Future[TokenMask]]]) -> None:
        self.waited = 0.0  # seconds that the step waited for them
        self._rows = rows

    def collect(self, patience: float = PATIENCE) -> StepMasks:
        """Wait for all, but not for ever: one that takes too much work is its own request's fault, and one that gets no
        processor for `patience` seconds its own request's failure."""
        made = StepMasks()
        started = time.perf_counter()
        for work, future in self._rows:
            try:
                await_mask(work, future, started, patience)
                if future.done():
                    made.masks[work.request_id] = future.result()
                elif future.cancel():
                    made.masks[work.request_id] = work()
                elif work.seconds >= MAX_WORK:
                    raise GrammarFault(f"its next tokens take more than {MAX_WORK:g} s of processor time")
                else:
                    made.late[work.request_id] = f"the grammar's next tokens were not known within {patience:g} s"
            except EngineBusy as busy:  # it had been forgotten, and was to be compiled again
                made.late[work.request_id] = str(busy)
            except GrammarFault as fault:
                made.faults[work.request_id] = f"the grammar cannot be held to any further: {fault}"
        self.waited = time.perf_counter() - started
        return made


def await_mask(work: MaskWork, future: Future[TokenMask], since: float, patience: float) -> None:
    """Until it is done, has taken its share of work, or the time of one that runs, or does not, is over. `since` is
    time.perf_counter's."""
    while work.seconds < MAX_WORK:
        deadline = since + (patience if work.has_begun else min(patience, HELP_AFTER))
        left = deadline - time.perf_counter()
        if left <= 0 or wait([future], min(left, GLANCE)).done:
            return
