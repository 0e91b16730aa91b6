"""One answer while it is made: the requests of one body, their stream, and a Choice for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import orjson

from scheduler.messages import GenerationRequest, RequestOutput
from server.async_engine import AsyncEngine
from server.choice import Choice, Delta
from server.reports import report_json

log = logging.getLogger("pagekv")

Step = tuple[int, Delta] | None


class Generation:
    """Deltas of all choices in the order they are made. `close` aborts whatever has not ended, and may be repeated."""

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[GenerationRequest],
        choices: Sequence[Choice],
    ) -> None:
        """Raises what AsyncEngine.generate does."""
        self.choices = choices
        self._stream = engine.generate(requests)
        self._first: asyncio.Task[Step] | None = None  # the first step, if `begin` was called and nobody has taken it

    async def begin(self, seconds: float) -> None:
        """Wait for the first step, but no longer than `seconds`. Raises ApiError if it fails by then; otherwise `next`
        gives the step."""
        self._first = asyncio.ensure_future(self._advance())
        await asyncio.wait((self._first,), timeout=seconds)
        if self._first.done():
            self._first.result()

    async def next(self) -> Step:
        """The next delta and the index of its choice, or None when all have ended. Raises ApiError."""
        if self._first is None:
            return await self._advance()
        first, self._first = self._first, None
        return await first

    async def _advance(self) -> Step:
        async for index, output in self._stream:
            log_report(output)
            delta = self.choices[index].push(output)
            if delta.finish_reason is not None:
                self._stream.finish(index)
            return index, delta
        return None

    async def run(self) -> None:
        """To the end, for an answer that is sent whole."""
        while await self.next() is not None:
            pass

    def close(self) -> None:
        self._stream.close()
        if self._first is not None and not self._first.cancel() and not self._first.cancelled():
            self._first.exception()  # nobody waits for it any more, so asyncio need not log it


def log_report(output: RequestOutput) -> None:
    if output.report is not None and log.isEnabledFor(logging.DEBUG):
        log.debug("cache report of %s: %s", output.request_id, orjson.dumps(report_json(output.report)).decode())
