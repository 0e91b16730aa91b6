"""Which compiled grammars are kept: the most recently used, as far as count and bytes allow."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.compiled import LEAST_BYTES, CompiledGrammars
from scheduler.messages import Grammar, GrammarKind

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["get", "measured", "forget"]), st.integers(0, 9), st.integers(0, 5 * LEAST_BYTES))
)


def named(index: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(index))


@given(OPERATIONS)
def test_whatever_is_done_count_and_bytes_are_bounded_and_the_last_used_stays(operations: list[Any]) -> None:
    kept = CompiledGrammars(4, 8 * LEAST_BYTES)
    for operation, index, size in operations:
        if operation == "get":
            future = kept.get(named(index), Future)
            assert kept.get(named(index), Future) is future
        elif operation == "measured":
            kept.measured(named(index), size)
        else:
            kept.forget(named(index))
        kept.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    kept = CompiledGrammars(2, 10**9)
    first, second = kept.get(named(1), Future), kept.get(named(2), Future)
    kept.get(named(1), Future)
    kept.get(named(3), Future)
    assert kept.get(named(1), Future) is first
    assert kept.get(named(2), Future) is not second
