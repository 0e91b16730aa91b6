"""PromptLedger: where the K/V of each position of a prompt came from."""

from __future__ import annotations

from scheduler.messages import PromptUsage


class Source:
    """Marks of where the K/V of one prompt position came from; one byte each in the ledger."""

    UNKNOWN, COMPUTED, REUSED, COPIED, PENDING = range(5)


_KEEPING_OWN = [
    bytes(Source.COMPUTED if mark == Source.COMPUTED else source for mark in range(256)) for source in range(5)
]
"""For `bytes.translate`: by source, every mark becomes it but COMPUTED."""


class PromptLedger:
    """Where the K/V of each prompt position came from, until the prefill first ends.

    A position that the request computed once stays its own work, even if a preemption later finds it in the cache.
    """

    def __init__(self, prompt_len: int) -> None:
        self._marks = bytearray(prompt_len)

    def found(self, start: int, end: int, source: int) -> None:
        """Positions [start, end) were found in the cache."""
        self._marks[start:end] = self._marks[start:end].translate(_KEEPING_OWN[source])

    def computed(self, start: int, end: int) -> int:
        """Positions [start, end) were computed by this request; returns how many of them not for the first time."""
        end = min(end, len(self._marks))
        again = self._marks[start:end].count(Source.COMPUTED)
        self._marks[start:end] = bytes([Source.COMPUTED]) * max(0, end - start)
        return again

    def usage(self) -> PromptUsage:
        count = self._marks.count
        return PromptUsage(
            prompt_tokens=len(self._marks),
            reused=count(Source.REUSED),
            copied=count(Source.COPIED),
            pending=count(Source.PENDING),
            computed=count(Source.COMPUTED) + count(Source.UNKNOWN),
        )

    def computed_ranges(self) -> list[tuple[int, int]]:
        """The positions this request computed, as ascending disjoint [start, end) ranges."""
        ranges = []
        end = 0
        while (start := self._marks.find(Source.COMPUTED, end)) >= 0:
            end = start
            while end < len(self._marks) and self._marks[end] == Source.COMPUTED:
                end += 1
            ranges.append((start, end))
        return ranges
