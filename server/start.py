"""The command's entry point: it decides how a signal ends the process before anything else is imported.

Until the server listens, a signal ends the process at once. Python's own end would wait for threads that load a model
or import a library, and abort ("terminate called without an active exception") where one of them is in C++ just then.
For the same reason a command that has done its work ends without Python's own end.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    leave_at_signals()
    from server.cli import main as command

    status: object = 0
    try:
        command()
    except SystemExit as ended:  # click's way to end, with a number
        status = ended.code
    end_process(status if isinstance(status, int) else 1)


def leave_at_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, leave)


def leave(number: int, _: FrameType | None) -> None:
    """End the process now, with the exit status of one that the signal has ended."""
    end_process(128 + number)


def end_process(status: int) -> None:
    """What was written is flushed; nothing is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
