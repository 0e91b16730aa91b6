"""Starts `pagekv serve`, or another server, in its own process for the time of a measurement."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

import httpx

from benchmarks.client import BenchmarkError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
COMMAND = (sys.executable, "-c", "from server.cli import main; main()", "serve")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(base: str, server: subprocess.Popen[bytes], log: str, interval: float = 0.2) -> None:
    """Raises BenchmarkError, with the end of the server's log, if it exits or is not healthy in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        time.sleep(interval)
    with open(log, encoding="utf-8", errors="replace") as file:
        raise BenchmarkError(f"the server did not start:\n{file.read()[-4000:]}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """Interrupted, then killed."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _leave(signum: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def running(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The base URL of the server that `command` starts on `port`; stopped at the end, also when this is terminated.

    `environment`: all of it; None for this process's own.
    """
    base = f"http://127.0.0.1:{port}"
    previous = signal.signal(signal.SIGTERM, _leave)
    with tempfile.NamedTemporaryFile(prefix="pagekv-bench-", suffix=".log") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until_healthy(base, server, log.name)
            yield base
        finally:
            stop(server)
            signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[str]:
    """The base URL of a server of ours started with `arguments` on a free port."""
    port = free_port()
    command = [*COMMAND, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    print(f"$ pagekv {shlex.join(command[3:])}", flush=True)
    with running(command, port) as base:
        yield base
