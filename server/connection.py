"""Work that stops when the client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answers import Format
from server.errors import ApiError, ClientDisconnected, EngineFailure
from server.generation import Generation
from server.wire import DATA_WIRE, Json, Wire

Result = TypeVar("Result")

log = logging.getLogger("pagekv")


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


class EventStream(Response):
    """The chunks of a generation as server-sent events, spelled by `wire`.

    Nothing is read from the generation while the client's socket takes no more, so a slow reader holds back only
    itself. An error after the start is an event of its own, ahead of the wire's end. After each `ping` seconds of
    silence a ping is sent, as proxies and clients give up on connections that send nothing; 0 sends none.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Format, wire: Wire = DATA_WIRE, ping: float = 0.0) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._wire = wire
        self._ping = ping
        self._last_sent = 0.0  # on the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # headers go out with a body
            await until_disconnect(receive, self._pump(send))
        except ClientDisconnected:
            pass
        finally:
            self._generation.close()

    async def _pump(self, send: Send) -> None:
        pinging = asyncio.ensure_future(self._send_pings(send))
        try:
            await self._pump_chunks(send)
        except ApiError as error:
            await self._send(send, self._wire.failure(error))
        except Exception:
            log.exception("an answer failed after its stream had begun")
            failure = EngineFailure("The server failed while it wrote this answer.")
            await self._send(send, self._wire.failure(failure))
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": self._wire.end(), "more_body": False})

    async def _pump_chunks(self, send: Send) -> None:
        choices = self._generation.choices
        step = await self._generation.next()
        await self._send(send, self._answer.opening(choices))
        while step is not None:
            await self._send(send, self._answer.chunks(*step))
            step = await self._generation.next()
        await self._send(send, self._answer.closing(choices))

    async def _send(self, send: Send, contents: list[Json]) -> None:
        if contents:
            await self._write(send, b"".join(map(self._wire.event, contents)))

    async def _send_pings(self, send: Send) -> None:
        if not self._ping:
            return
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        while True:
            await asyncio.sleep(self._last_sent + self._ping - clock())
            if clock() >= self._last_sent + self._ping:
                await self._write(send, self._wire.ping())

    async def _write(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()
