"""Cutting a text at the first stop string while the text is still arriving."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, wherever the pieces it arrives in are split.

    The first stop string is the one completed first: at that character generation would have ended, had the text come
    one character at a time. Of several that are completed together (one ends another) the longest is taken. Only text
    that could still become a stop string is held back: fewer characters than the longest one has.

        stops = ["</s>"]     push("a <")  -> "a "      "<" could begin a stop
                             push("b")    -> "<b"      it did not
                             push("</s>c") -> ""       `matched` is "</s>", and nothing comes after
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` lets the stop string itself through. Empty stop strings match nothing."""
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=lambda stop: (-len(stop), stop)))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string; empty ever after one has matched."""
        if self.matched is not None:
            return ""
        held = self._held + text
        first = self._first_match(held)
        if first is None:
            safe = len(held) - self._could_become_stop(held)
            self._held = held[safe:]
            return held[:safe]
        end, stop = first
        self._held, self.matched = "", stop
        return held[: end if self._include else end - len(stop)]

    def finish(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first; the longest stop of those, since stops are in that order."""
        ends = ((start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0)
        return min(ends, key=lambda match: match[0], default=None)

    def _could_become_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = min(len(text), len(self._stops[0]) - 1) if self._stops else 0
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return length
        return 0
