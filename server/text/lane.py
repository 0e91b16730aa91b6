"""A text process and the thread that waits for it: jobs go through one after another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from server.text.limits import Limits
from server.text.process import Stopped, TextProcess


@dataclass(slots=True)
class Ticket:
    cancelled: bool = False


class Lane:
    """Starts its process when the first job comes, and again after a job that ended it. A job whose caller is cancelled
    does not begin, or is ended with the process."""

    def __init__(self, name: str, make_setup: Callable[[], dict[str, Any]], limits: Limits) -> None:
        self._make_setup = make_setup
        self._limits = limits
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()  # over the next three
        self._process: TextProcess | None = None
        self._running: Ticket | None = None
        self._closed = False

    async def start(self) -> None:
        """Have the process up before the first job. Raises TextProcessError for what is wrong with its setup."""
        await self._queue(lambda process: b"")

    async def ask(self, make_job: Callable[[], bytes]) -> bytes:
        """The result of a job, which is made on the lane's thread. Raises TextProcessError."""
        return await self._queue(lambda process: process.ask(make_job()))

    async def _queue(self, work: Callable[[TextProcess], bytes]) -> bytes:
        ticket = Ticket()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work, ticket)
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise

    def close(self) -> None:
        """Waits for no job: one under way ends with its process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            if self._process is not None and self._running is None:
                self._process.end()
            elif self._process is not None:
                self._process.kill()  # the lane's thread does the rest

    def _cancel(self, ticket: Ticket) -> None:
        with self._lock:
            ticket.cancelled = True
            if self._running is ticket and self._process is not None:
                self._process.kill()

    def _run(self, work: Callable[[TextProcess], bytes], ticket: Ticket) -> bytes:
        process = self._begin(ticket)
        try:
            if not process.is_set_up:
                process.set_up(self._make_setup())
            return work(process)
        finally:
            with self._lock:
                self._running = None
                if self._closed:
                    process.end()

    def _begin(self, ticket: Ticket) -> TextProcess:
        with self._lock:
            if self._closed or ticket.cancelled:
                raise Stopped
            if self._process is not None and self._process.ended:
                self._process.end()  # its pipes are still open
                self._process = None
            if self._process is None:
                self._process = TextProcess(self._limits)
            self._running = ticket
            return self._process
