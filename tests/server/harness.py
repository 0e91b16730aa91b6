"""A real HTTP server on a thread, around a fake engine and a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn

from scheduler.commands import AdapterInfo
from scheduler.messages import EngineInfo
from server.app import create_app
from server.async_engine import AsyncEngine
from server.http_protocol import http_config
from server.state import ServerSettings
from server.text.chat_template import TemplateSource
from server.text.encoding import Encoded, EncodeJob, wanted
from tests.server.fake_engine import EOS, INFO, FakeEngine

POLITE = (
    "{% for message in messages %}{% if message.content == 'rude' %}{{ raise_exception('be polite') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


class ByteTokenizer:
    """Ids 0..255 are bytes; EOS is special and has no text. Its chat template wants users to be polite."""

    special_token_ids = frozenset({EOS})
    strips_leading_space = False
    has_chat_template = True
    takes_tools = False
    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_job(self, job: EncodeJob) -> Encoded:
        ids = self.encode(job.text)
        return wanted(job, ids, [index for index, char in enumerate(job.text) for _ in char.encode()])

    def refuse_long(self, text: str, max_tokens: int | None) -> None:
        pass

    @property
    def template_source(self) -> TemplateSource:
        return TemplateSource(POLITE, None, {}, ())

    @property
    def encoder(self) -> ByteTokenizer:
        return self

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self.token_name(token_id) for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>" if token_id == EOS else b""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id) for id in token_ids if id not in skipped).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass
class Running:
    url: str
    engine: FakeEngine
    bridge: AsyncEngine
    server: uvicorn.Server

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20)


@contextmanager
def serve(
    settings: ServerSettings | None = None,
    *,
    tokenizer: ByteTokenizer | None = None,
    adapters: Sequence[AdapterInfo] = (),
    **options: Any,
) -> Iterator[Running]:
    """A server around `FakeEngine(**options)`; it and all its threads have ended when the block is left."""
    made: list[FakeEngine] = []

    def make(deliver: Callable[[Any], None]) -> FakeEngine:
        made.append(FakeEngine(deliver, **options))
        return made[0]

    bridge = AsyncEngine(make)
    info = bridge.start()
    with listening(bridge, info, tokenizer or ByteTokenizer(), settings or ServerSettings("toy"), adapters) as (
        url,
        http,
    ):
        yield Running(url, made[0], bridge, http)


@contextmanager
def listening(
    bridge: AsyncEngine,
    info: EngineInfo,
    tokenizer: Any,
    settings: ServerSettings,
    adapters: Sequence[AdapterInfo] = (),
) -> Iterator[tuple[str, uvicorn.Server]]:
    """The address of a server around an engine that has started, and which ends with it."""
    app = create_app(bridge, info, tokenizer, settings, adapters)
    listener = socket.create_server(("127.0.0.1", 0))
    config = http_config(app, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="http")
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()
        bridge.stop_now()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition of another thread, for so long at most."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come true in time")
        time.sleep(0.005)


def small(max_model_len: int) -> Any:
    return replace(INFO, max_model_len=max_model_len)
