"""What this machine has: memory for the pool, cores for computing."""

from __future__ import annotations

import ctypes
import os
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
