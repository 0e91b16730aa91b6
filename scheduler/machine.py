"""What this machine has: memory for the pool, cores for computing."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes this process may still use: the machine's available memory, or its container's where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def return_freed_memory() -> None:
    """Have the C library give freed memory back to the system, where it can be asked to (glibc).

    It keeps what large tensors were freed from, for the next ones: after loading, once the weights again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def allocated_memory() -> int:
    """Bytes that this process has allocated from the C library and not freed; 0 where the library does not report it
    (glibc does)."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks + found.hblkhd)


def thread_clock() -> Callable[[], float]:
    """A clock of the calling thread's processor time, in seconds, which any thread may read while that one lives. Where
    the system has none (macOS), a clock on the wall."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.perf_counter
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)
