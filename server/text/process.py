"""A text process as the server sees it: started, asked, and killed.

TextProcessError
+-- OverTime        the job ran over its processor time
+-- OverMemory      the job wanted more memory than it may have, or the machine had none
+-- JobRefused      the job's own fault, in words for the client
+-- Stopped         the process was killed by this server
+-- ProcessFailed   the process cannot work here, which is the server's fault
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import orjson
import psutil  # type: ignore[import-untyped]

from server.text.frames import Frame, read_frame, write_frame
from server.text.limits import OUT_OF_MEMORY, Limits

ROOT = Path(__file__).parents[2]  # where `server` is
# One thread, and one arena of memory: threads would reserve more than they use, against the limit.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
BY_MEMORY = {OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL}  # Python, Rust and the system, each its own way


STUCK = 5  # seconds between two looks at a process that has not answered


class TextProcessError(Exception):
    """This job has no result."""


class OverTime(TextProcessError):
    pass


class OverMemory(TextProcessError):
    pass


class JobRefused(TextProcessError):
    pass


class Stopped(TextProcessError):
    pass


class ProcessFailed(TextProcessError):
    def __init__(self, status: int) -> None:
        super().__init__(f"A text process ended with status {status}.")


class TextProcess:
    """Asked by one thread at a time; any other may kill it, which ends the asking."""

    def __init__(self, limits: Limits) -> None:
        """Starts it from nothing: a fork of a server with threads is not safe."""
        paths = [str(ROOT), *(path for path in sys.path if path)]
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-m", "server.text.worker"],  # `site` takes longer than all else
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the server
        )
        self._killed = threading.Event()
        self._ended = False
        self.is_set_up = False

    def set_up(self, setup: dict[str, Any]) -> None:
        """What its jobs are about, before the first of them. Raises TextProcessError."""
        self.ask(orjson.dumps({**setup, "limits": self._limits}))
        self.is_set_up = True

    @property
    def ended(self) -> bool:
        """Whether it takes no more jobs."""
        return self._ended or self._process.poll() is not None

    def ask(self, job: bytes) -> bytes:
        """The result of a job. Raises TextProcessError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            write_frame(self._process.stdin, Frame(job))
            self._await(self._process.stdout)
            frame = read_frame(self._process.stdout)
        except (OSError, ValueError):  # it ended before it had read all
            frame = None
        if frame is None:
            raise self._reap()
        if frame.last:
            self.end()
        if frame.fault:
            raise JobRefused(frame.payload.decode("utf-8", "replace"))
        return frame.payload

    def _await(self, results: IO[bytes]) -> None:
        """Until there is a result, or none to come. A process that neither works nor waits for the processor hangs in
        what it does for want of memory, as a handler that needs some itself; it is ended as one that was refused it."""
        seen = None
        while not select.select([results], [], [], STUCK)[0]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self._process.pid)
                work = process.cpu_times()[:2]
                if work == seen and process.status() == psutil.STATUS_SLEEPING:
                    self._process.send_signal(signal.SIGABRT)
                seen = work

    def kill(self) -> None:
        """From any thread; whoever asks gets Stopped."""
        self._killed.set()
        self._process.kill()

    def end(self) -> None:
        """Kill it and leave nothing behind."""
        self.kill()
        self._reap()

    def _reap(self) -> TextProcessError:
        """Why it ended."""
        self._ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return OverTime()
        if self._killed.is_set():
            return Stopped()
        return OverMemory() if status in BY_MEMORY else ProcessFailed(status)
