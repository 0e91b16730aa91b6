"""Starts `pagekv serve` in its own process for the time of a measurement."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import httpx

from benchmarks.client import BenchmarkError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
COMMAND = (sys.executable, "-c", "from server.cli import main; main()", "serve")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(base: str, server: subprocess.Popen[bytes], log: str) -> None:
    """Raises BenchmarkError, with the end of the server's log, if it exits or is not healthy in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    with open(log, encoding="utf-8", errors="replace") as file:
        raise BenchmarkError(f"the server did not start:\n{file.read()[-4000:]}")


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[str]:
    """The base URL of a server started with `arguments` on a free port; interrupted, then killed, at the end."""
    base_port = free_port()
    base = f"http://127.0.0.1:{base_port}"
    command = [*COMMAND, *arguments, "--host", "127.0.0.1", "--port", str(base_port)]
    with tempfile.NamedTemporaryFile(prefix="pagekv-bench-", suffix=".log") as log:
        print(f"$ pagekv {shlex.join(command[3:])}", flush=True)
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(base, server, log.name)
            yield base
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
