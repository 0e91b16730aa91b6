"""One connection of HTTP/1: uvicorn's protocol, with bounds on what a client may leave open.

    a head (request line and headers), or anything else that is no body, of more than 64 KiB     431, closed
    a head that does not arrive in time, or a connection that sends nothing                      408, or just closed
    a client that closes its sending half after the request                                      gets its answer
    HTTP/1.0                                                                                     answers without chunks

httptools hands a header over when it is complete and joins its pieces until then, so without a bound one endless header
costs time quadratic in its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Any

import orjson
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import error_body

MAX_HEAD = 64 * 1024  # bytes of a request's head
MAX_LINGER = 1024 * 1024  # bytes that are read and thrown away after a refusal, so that the client gets to read it
LINGER = 1.0  # seconds, likewise
PROBE_EVERY = 1.0  # seconds between looks whether a client that has closed its sending half is still there
FIRST_PROBE = 0.2
PROBE_ANSWER = 0.05  # seconds after which a reset must have come back
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    head_timeout = 30.0  # seconds for a head to arrive, from the start of the connection or from its first byte

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = 0  # bytes since the last head or piece of a body was complete
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # a head is arriving
        self._lingering: int | None = None  # bytes thrown away since the connection was refused

    # -- bounds on a head ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Data goes to the parser in pieces no larger than what a head may still have, so that the bound is exact."""
        if self._lingering is not None:
            self._throw_away(len(data))
            return
        rest = memoryview(data)
        while rest and not self.transport.is_closing() and self._lingering is None:
            part, rest = rest[: MAX_HEAD - self._pending], rest[MAX_HEAD - self._pending :]
            self._pending += len(part)
            super().data_received(bytes(part))
            if self._pending >= MAX_HEAD:
                self._refuse(431, f"The request's head is larger than {MAX_HEAD} bytes.", "request_head_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._pending = 0
        self._has_begun = False
        self._stop_expecting_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.__class__ = UnframedCycle

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._stop_expecting_head()
        self._head_timer = self.loop.call_later(self.head_timeout, self._on_late_head)

    def _stop_expecting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        if self._has_begun:
            message = f"The request's head did not arrive within {self.head_timeout:g} seconds."
            self._refuse(408, message, "request_timeout")
        elif not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in the API's error shape, and close; an answer under way is cut off instead. What the client still
        sends is read for a moment: a socket that is closed over unread data is reset, and the client may lose the
        answer."""
        if self.transport.is_closing() or self._lingering is not None:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = orjson.dumps(error_body(message, code=code))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._stop_expecting_head()
        self._unset_keepalive_if_required()
        self._lingering = 0
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)

    def _throw_away(self, size: int) -> None:
        assert self._lingering is not None
        self._lingering += size
        if self._lingering > MAX_LINGER:
            self.transport.abort()

    # -- a client that closes its sending half ------------------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection: an answer is due. A client that has closed its sending half looks like one that is
        gone; only writing to it shows the difference."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._has_begun:
            return None
        cycle.keep_alive = False
        self.loop.call_later(FIRST_PROBE, self._probe)
        return True

    def _probe(self) -> None:
        """An interim response, which clients skip, is answered with a reset where nobody is left."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self.loop.call_later(PROBE_ANSWER, self._look_for_reset)

    def _look_for_reset(self) -> None:
        if self.transport.is_closing():
            return
        error = 0
        with contextlib.suppress(OSError):
            error = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.transport.abort()
        else:
            self.loop.call_later(PROBE_EVERY, self._probe)


class UnframedCycle(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""

    _is_unframed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            named = {name.lower() for name, _ in message.get("headers", ())}
            self._is_unframed = b"content-length" not in named
        if not self._is_unframed or self.disconnected:
            await super().send(message)
        elif message["type"] == "http.response.start":
            self.keep_alive = False
            await self._send_head(message)
        else:
            await self._send_piece(message)

    async def _send_head(self, message: ASGISendEvent) -> None:
        """uvicorn announces chunks for any method but HEAD."""
        method = self.scope["method"]
        self.scope["method"] = "HEAD"
        try:
            await super().send(message)
        finally:
            self.scope["method"] = method

    async def _send_piece(self, message: Any) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if self.scope["method"] != "HEAD":
            self.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()


def http_config(app: Any, *, keep_alive: float = 75.0, backlog: int = 2048, **options: Any) -> uvicorn.Config:
    """How `app` is served. A connection stays open for `keep_alive` seconds between requests: longer than clients keep
    theirs, so that none sends into a connection that is being closed."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        backlog=backlog,
        server_header=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
        **options,
    )
