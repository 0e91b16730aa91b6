"""What one job of a text process may take, enforced by the operating system.

Processor time rather than time on the clock: on a crowded machine a job that is honest takes longer, and no more work.
"""

from __future__ import annotations

import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
OUT_OF_MEMORY = 77  # exit status
STATUS = Path("/proc/self/status")  # Linux's


@dataclass(frozen=True, slots=True)
class Limits:
    """`seconds` of processor time for each job, and `memory` (bytes) over what the process has before it begins. It
    ends after a job that leaves it with more than `kept` bytes of that."""

    seconds: float
    memory: int
    kept: int


def limit_memory(limits: Limits) -> None:
    """From here on. Only Linux tells how much a process has, and holds it to a limit."""
    used = memory_of("VmData")
    if used is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = used + limits.memory
        resource.setrlimit(
            resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def memory_of(name: str) -> int | None:
    """Bytes of this process, by the name that /proc has for them; None where there is no /proc."""
    try:
        status = STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def begin_job(limits: Limits) -> None:
    """The process ends by SIGPROF when the job runs over."""
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)


def end_job() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
