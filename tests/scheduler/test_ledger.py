from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.ledger import PromptLedger, Source

N = 20
FOUND = [Source.REUSED, Source.COPIED, Source.PENDING]


def test_what_nobody_spoke_of_was_computed() -> None:
    assert PromptLedger(5).usage().computed == 5


def test_sources_are_told_apart() -> None:
    ledger = PromptLedger(10)
    ledger.found(0, 4, Source.REUSED)
    ledger.found(4, 8, Source.PENDING)
    ledger.found(8, 9, Source.COPIED)
    assert ledger.computed(9, 10) == 0
    usage = ledger.usage()
    assert (usage.prompt_tokens, usage.reused, usage.pending, usage.copied, usage.computed) == (10, 4, 4, 1, 1)
    assert usage.cached_tokens == 9


def test_computing_again_is_told_and_counted_once() -> None:
    ledger = PromptLedger(10)
    assert ledger.computed(0, 6) == 0
    assert ledger.computed(4, 10) == 2
    assert ledger.usage().computed == 10


def test_what_was_computed_once_stays_own_work() -> None:
    ledger = PromptLedger(10)
    ledger.computed(0, 4)
    ledger.found(0, 8, Source.REUSED)
    usage = ledger.usage()
    assert (usage.computed, usage.reused) == (6, 4)


def test_a_promise_that_was_not_kept_becomes_own_work() -> None:
    ledger = PromptLedger(8)
    ledger.found(0, 8, Source.PENDING)
    ledger.computed(4, 8)
    usage = ledger.usage()
    assert (usage.pending, usage.computed) == (4, 4)


def test_output_positions_are_no_part_of_it() -> None:
    ledger = PromptLedger(5)
    ledger.found(4, 8, Source.REUSED)
    assert ledger.computed(4, 9) == 0
    assert ledger.computed(5, 9) == 0
    assert ledger.computed(7, 9) == 0
    usage = ledger.usage()
    assert usage.prompt_tokens == 5 and usage.computed == 5


def test_ranges_of_what_was_computed() -> None:
    ledger = PromptLedger(10)
    for start, end in [(0, 2), (4, 5), (5, 6), (9, 10)]:
        ledger.computed(start, end)
    assert ledger.computed_ranges() == [(0, 2), (4, 6), (9, 10)]
    assert PromptLedger(3).computed_ranges() == []


events = st.lists(st.tuples(st.sampled_from([None, *FOUND]), st.integers(0, N + 3), st.integers(0, 6)), max_size=12)


@given(events)
def test_against_a_dictionary(events: list[tuple[int | None, int, int]]) -> None:
    ledger = PromptLedger(N)
    marks: dict[int, int | None] = dict.fromkeys(range(N))
    for source, start, length in events:
        span = [position for position in range(start, start + length) if position < N]
        if source is None:
            again = sum(marks[position] == Source.COMPUTED for position in span)
            assert ledger.computed(start, start + length) == again
            marks |= dict.fromkeys(span, Source.COMPUTED)
        else:
            ledger.found(start, start + length, source)
            marks |= {position: source for position in span if marks[position] != Source.COMPUTED}
    usage = ledger.usage()
    assert usage.prompt_tokens == N == usage.reused + usage.copied + usage.pending + usage.computed
    values = list(marks.values())
    assert [usage.reused, usage.copied, usage.pending] == [values.count(source) for source in FOUND]
    computed = [p for start, end in ledger.computed_ranges() for p in range(start, end)]
    assert computed == [position for position, mark in marks.items() if mark == Source.COMPUTED]
