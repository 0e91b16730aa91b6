"""How a stream of answers is spelled as server-sent events; the APIs differ in it."""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from server.errors import ApiError

Json = dict[str, Any]

COMMENT = b": ping\n\n"  # clients skip a line that begins with a colon


class Wire(Protocol):
    def event(self, content: Json) -> bytes:
        """One event."""

    def failure(self, error: ApiError) -> list[Json]:
        """The contents of the events that tell of an error after the stream has begun."""

    def ping(self) -> bytes:
        """What shows that the server is still there while there is nothing to say."""

    def end(self) -> bytes:
        """What comes after the last event."""


class DataWire:
    """Completions and chat: data alone, and `[DONE]` at the end."""

    def event(self, content: Json) -> bytes:
        return b"data: " + orjson.dumps(content) + b"\n\n"

    def failure(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def ping(self) -> bytes:
        return COMMENT

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class NamedWire:
    """Events that bear the name of their content's `type`, and nothing after the last."""

    def event(self, content: Json) -> bytes:
        return f"event: {content['type']}\ndata: ".encode() + orjson.dumps(content) + b"\n\n"

    def ping(self) -> bytes:
        return COMMENT

    def end(self) -> bytes:
        return b""


DATA_WIRE = DataWire()
