"""From a configuration to a listening server, and to a clean end of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from scheduler.commands import AdapterInfo, ListAdapters
from scheduler.config import EngineConfig
from scheduler.messages import EngineInfo, StepOutput
from server.async_engine import AsyncEngine, EngineFactory, EngineLike
from server.http_protocol import http_config
from server.last_resort import LastResort
from server.start import SIGNALS, leave
from server.tools import DEFAULT_FORMAT
from server.version import VERSION

if TYPE_CHECKING:  # what takes seconds to import is imported beside the loading of the model
    from server.prompt import PromptEncoder
    from server.state import ServerSettings
    from server.tokenizer import Tokenizer

GRACE = 5  # seconds that clients get, at the end, to read what was already said
PATIENCE = 4 * GRACE  # seconds after a first signal in which the process ends, whatever hangs
IMPATIENCE = 0.8  # seconds, likewise, after a second one
TURN = 0.0002  # seconds

log = logging.getLogger("pagekv")


class ServeError(Exception):
    """The server cannot start; the message is one line for the operator."""


def engine_thread(config: EngineConfig) -> EngineFactory:
    """The engine of `pagekv serve`: on a thread of this process."""

    def make(deliver: Callable[[StepOutput], None]) -> EngineLike:
        from scheduler.engine_thread import EngineThread

        return EngineThread(config, deliver, progress=True)

    return make


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All that `pagekv serve` may set of the server itself."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks a free one
    model_names: tuple[str, ...] = ()  # answers call the model by the first; none: its own name
    cors_origins: tuple[str, ...] = ()
    sse_ping: float = 5.0  # seconds; 0 for no pings
    tool_call_parser: str = DEFAULT_FORMAT
    reveal_cached_tokens: bool = False
    chat_template: str | None = None  # path of a file; None: the model's own
    log_level: str = "info"
    clamps_max_tokens: bool = False
    keep_alive: float = 75.0  # seconds that a connection stays open between requests


def run(make_engine: EngineFactory, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises ServeError when the port, the model or an adapter cannot be had."""
    set_up_logging(options.log_level)
    template = None if options.chat_template is None else read_template(options.chat_template)
    with bind(options.host, options.port) as listener, interruptible():
        loading = TokenizerLoading(template)
        engine, info = start_engine(make_engine, loading.begin)
        try:
            from server.state import ServerSettings

            names = options.model_names or (info.model_name or Path(info.model_path).stem,)
            settings = ServerSettings(
                names[0],
                aliases=names[1:],
                cors_origins=options.cors_origins,
                sse_ping=options.sse_ping,
                tool_call_parser=options.tool_call_parser,
                clamps_max_tokens=options.clamps_max_tokens,
                reveal_cached_tokens=options.reveal_cached_tokens,
            )
            adapters = list_adapters(engine, names)
            tokenizer = loading.result()
            listen(listener, engine, info, tokenizer, settings, adapters, options)
        finally:
            engine.stop_now()


def read_template(path: str) -> str:
    """The operator's template, which must compile. Raises ServeError."""
    from server.text.service import TemplateBroken, check_template

    try:
        text = Path(path).read_text(encoding="utf-8")
        check_template(text)
        return text
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"cannot read the chat template {path}: {one_line(error)}") from None
    except TemplateBroken as error:
        raise ServeError(f"{path}: {one_line(error)}") from None


def set_up_logging(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is known before the model is loaded, and no client
    connects to a server that cannot answer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While the model loads, a signal ends the process at once: nothing of value is under way."""
    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_engine(make_engine: EngineFactory, found: Callable[[str], None]) -> tuple[AsyncEngine, EngineInfo]:
    try:
        engine = AsyncEngine(make_engine)
        threading.Thread(target=import_app, name="imports", daemon=True).start()
        with quick_start():
            return engine, engine.start(found)
    except Exception as error:
        log.debug("the engine did not start", exc_info=True)
        raise ServeError(one_line(error)) from None


def import_app() -> None:
    """Tokenizers, templates and the web framework take as long to import as a small model to load. What fails here
    fails again, and is told, where it is needed."""
    with contextlib.suppress(Exception):
        import scheduler.engine  # noqa: F401  the engine's thread does: to wait for it is quicker than to import beside it
        import server.app  # noqa: F401


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """Short turns of the interpreter: a thread that loads leaves it for each tensor, and would wait 5 ms to get it back
    from one that imports. No search for garbage among what imports make, now or later: it stays."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        sys.setswitchinterval(before)


class TokenizerLoading:
    """The tokenizer, loaded beside the model's weights."""

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template
        self._loaded: Future[Tokenizer] = Future()

    def begin(self, model_path: str) -> None:
        threading.Thread(target=self._load, args=(model_path,), name="tokenizer", daemon=True).start()

    def _load(self, model_path: str) -> None:
        try:
            self._loaded.set_result(load_tokenizer(model_path, self._chat_template))
        except BaseException as error:
            self._loaded.set_exception(error)

    def result(self) -> Tokenizer:
        """Waits for it. Raises ServeError."""
        return self._loaded.result()


def list_adapters(engine: AsyncEngine, model_names: Sequence[str]) -> tuple[AdapterInfo, ...]:
    """Those that the engine was started with. Raises ServeError where a client could not tell one from the model."""
    adapters: tuple[AdapterInfo, ...] = engine.call(ListAdapters(), tuple)
    for adapter in adapters:
        if adapter.name in model_names:
            raise ServeError(f"--lora {adapter.name}: this is the name of the model itself")
    return adapters


def load_tokenizer(model_path: str, chat_template: str | None) -> Tokenizer:
    from server.tokenizer import Tokenizer

    try:
        return Tokenizer.load(model_path, chat_template)
    except Exception as error:
        log.debug("the tokenizer did not load", exc_info=True)
        raise ServeError(f"cannot load the tokenizer of {model_path}: {one_line(error)}") from None


def listen(
    listener: socket.socket,
    engine: AsyncEngine,
    info: EngineInfo,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    adapters: Sequence[AdapterInfo],
    options: ServeOptions,
) -> None:
    from server.app import create_app

    app = create_app(engine, info, tokenizer, settings, adapters)
    config = http_config(
        app,
        keep_alive=options.keep_alive,
        loop="uvloop",
        access_log=options.log_level == "debug",
        timeout_graceful_shutdown=2 * GRACE,  # only a handler that does not heed its client's leaving lasts so long
    )
    server = Server(config, engine, app.state.server.encoder, greeting(listener, info, settings))
    try:
        server.run(sockets=[listener])
    except OSError as error:
        raise ServeError(f"cannot listen: {error.strerror or error}") from None


def greeting(listener: socket.socket, info: EngineInfo, settings: ServerSettings) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return (
        f"pagekv {VERSION} serves {settings.model_name} on {url} "
        f"({info.device}, {info.backend}, {info.dtype}, {info.num_blocks} blocks x {info.block_size} tokens, "
        f"max_model_len {info.max_model_len})"
    )


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Server(uvicorn.Server):
    """Says where it listens; at the end, stops the engine first, so that running streams end rather than run on."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, encoder: PromptEncoder, greeting: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._last_resort = LastResort()
        self._encoder = encoder
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info(self._greeting)
        self._warming = asyncio.ensure_future(self._encoder.warm_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down")
        self._encoder.close()  # whoever waits for a text is told so
        await self._engine.stop()
        grace_ends = asyncio.get_running_loop().call_later(GRACE, self.cut_off)
        await super().shutdown(sockets)
        grace_ends.cancel()

    def cut_off(self) -> None:
        """Hang up on everybody: their handlers end as if the clients had, with nothing to cancel."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal end in order; at another one wait for no client any more. Either has its limit."""
        if self.should_exit:
            self._last_resort.arm(IMPATIENCE)
            asyncio.get_running_loop().call_soon_threadsafe(self.cut_off)
        else:
            self._last_resort.arm(PATIENCE)
            super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again: an asked-for end is exit code 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
