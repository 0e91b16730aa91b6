"""Work that stops when the client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answers import Format
from server.choice import Delta
from server.errors import ApiError, ClientDisconnected, EngineFailure
from server.generation import Generation

Result = TypeVar("Result")

log = logging.getLogger("pagekv")

DONE = b"data: [DONE]\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled, and ClientDisconnected raised, if the client leaves before."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


class EventStream(Response):
    """The chunks of a generation as server-sent events, then `[DONE]`.

    Nothing is read from the generation while the client's socket takes no more, so a slow reader holds back only
    itself. An error after the start is an event of its own, ahead of `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Format, first: tuple[int, Delta] | None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_disconnect(receive, self._pump(send))
        except ClientDisconnected:
            pass
        finally:
            self._generation.close()

    async def _pump(self, send: Send) -> None:
        try:
            await self._pump_chunks(send)
        except ApiError as error:
            await self._send(send, event(error.body()))
        except Exception:
            log.exception("an answer failed after its stream had begun")
            await self._send(send, event(EngineFailure("The server failed while it wrote this answer.").body()))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _pump_chunks(self, send: Send) -> None:
        choices = self._generation.choices
        await self._send(send, *map(event, self._answer.opening(len(choices))))
        step = self._first
        while step is not None:
            await self._send(send, *map(event, self._answer.chunks(*step)))
            step = await self._generation.next()
        await self._send(send, *map(event, self._answer.closing(choices)))

    async def _send(self, send: Send, *events: bytes) -> None:
        if events:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
