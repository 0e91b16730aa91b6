"""CompiledGrammars: those that are kept, so that the next request that names one need not wait for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from scheduler.messages import Grammar

LEAST_BYTES = 40_000  # of a compiled grammar; the least that was measured


@dataclass(slots=True)
class Kept:
    future: Future[LLMatcher]
    size: int  # bytes; an estimate until it is compiled


class CompiledGrammars:
    """Grammars by kind and text, compiled or about to be. The least recently used go where there are more than
    `max_count`, or than `max_bytes` of them; one always stays. Any thread."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Kept] = OrderedDict()
        self._bytes = 0

    def get(self, grammar: Grammar, compile: Callable[[], Future[LLMatcher]]) -> Future[LLMatcher]:
        """The grammar, which is compiled if it is not kept."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                found = self._kept[grammar] = Kept(compile(), least_bytes(grammar))
                self._bytes += found.size
                self._forget_oldest()
            self._kept.move_to_end(grammar)
            return found.future

    def measured(self, grammar: Grammar, size: int) -> None:
        """`size` is the number of bytes that compiling it left allocated; inexact, as other threads allocate too."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._bytes -= found.size
                found.size = max(size, least_bytes(grammar))
                self._bytes += found.size
                self._forget_oldest()

    def forget(self, grammar: Grammar) -> None:
        """Whoever waits for it still gets it."""
        with self._lock:
            found = self._kept.pop(grammar, None)
            self._bytes -= 0 if found is None else found.size

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def check_integrity(self) -> None:
        with self._lock:
            assert self._bytes == sum(kept.size for kept in self._kept.values())
            assert len(self._kept) <= self._max_count
            assert self._bytes <= self._max_bytes or len(self._kept) == 1

    def _forget_oldest(self) -> None:
        while len(self._kept) > 1 and (len(self._kept) > self._max_count or self._bytes > self._max_bytes):
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size


def least_bytes(grammar: Grammar) -> int:
    return LEAST_BYTES + 4 * len(grammar.text)  # the text itself, too
