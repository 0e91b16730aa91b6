"""The stopwatch of the micro benchmarks; imported by other engines' Pythons too, so it imports nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def microseconds(call: Callable[[], object], runs: int) -> float:
    """Of the fastest of `runs` calls: what else the machine does only ever adds."""
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6
