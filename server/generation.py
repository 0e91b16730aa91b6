"""One answer while it is made: the requests of one body, their stream, and a Choice for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from scheduler.messages import GenerationRequest, RequestOutput
from server.async_engine import AsyncEngine
from server.choice import Choice, Delta
from server.reports import report_json

log = logging.getLogger("pagekv")


class Generation:
    """Deltas of all choices in the order they are made. `close` aborts whatever has not ended, and may be repeated."""

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[GenerationRequest],
        choices: Sequence[Choice],
        answer_id: str | None = None,
    ) -> None:
        """Raises what AsyncEngine.generate does; BadRequest if an answer of this id is being made."""
        self.choices = choices
        self._stream = engine.generate(requests, answer_id)

    async def next(self) -> tuple[int, Delta] | None:
        """The next delta and the index of its choice, or None when all have ended. Raises ApiError."""
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


def log_report(output: RequestOutput) -> None:
    if output.report is not None and log.isEnabledFor(logging.DEBUG):
        log.debug("cache report of %s: %s", output.request_id, orjson.dumps(report_json(output.report)).decode())
