"""RECOVERY's table at the scheduler, B = 16, a prompt of 128 tokens: exact positions in exact steps."""

from __future__ import annotations

import pytest

from tests.scheduler.world import World, dense

PROMPT = list(range(128))

CASES = {
    # name: (blocks dropped, with partial reuse, without)
    "cold": (None, [(0, 128)], [(0, 128)]),
    "fully warm": ((), [(127, 128)], [(112, 128)]),
    "one block lost": ((2,), [(32, 48), (127, 128)], [(32, 48), (112, 128)]),
    "two gaps": ((1, 5), [(16, 32), (80, 96), (127, 128)], [(16, 32), (80, 96), (112, 128)]),
    "earlier gap too": ((0, 2), [(0, 16), (32, 48), (127, 128)], [(0, 16), (32, 48), (112, 128)]),
}


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_lost_blocks_are_computed_and_nothing_else(case: str, partial: bool) -> None:
    world = World(partial_reuse=partial)
    dropped, exact, whole = CASES[case]
    if dropped is not None:
        world.complete("first", PROMPT)
        world.drop(PROMPT, *dropped)
    assert world.complete("again", PROMPT) == (exact if partial else whole)
    assert world.tokens["again"] == dense(PROMPT, 1)
    world.check()


@pytest.mark.parametrize("partial", [True, False])
def test_truncate_computes_all_after_the_first_gap(partial: bool) -> None:
    world = World(recovery="truncate", partial_reuse=partial)
    world.complete("first", PROMPT)
    world.drop(PROMPT, 2)
    assert world.complete("again", PROMPT) == [(32, 128)]


@pytest.mark.parametrize("recovery", ["repair", "truncate"])
@pytest.mark.parametrize(("partial", "start"), [(True, 39), (False, 32)])
def test_an_edited_token_is_where_computing_starts(recovery: str, partial: bool, start: int) -> None:
    world = World(recovery=recovery, partial_reuse=partial)
    world.complete("first", PROMPT)
    edited = [*PROMPT[:39], 96, *PROMPT[40:]]
    assert world.complete("edited", edited) == [(start, 128)]
    assert world.tokens["edited"] == dense(edited, 1)


def test_invalidated_from_a_block_on() -> None:
    world = World()
    world.complete("first", PROMPT)
    world.scheduler.invalidate(world.node(PROMPT, 2))
    assert {node.index for node in world.tree} == {0, 1}
    assert world.complete("again", PROMPT) == [(32, 128)]
    world.check()


@pytest.mark.parametrize(("partial", "start"), [(True, 5), (False, 0)])
def test_same_tokens_after_another_prefix(partial: bool, start: int) -> None:
    world = World(partial_reuse=partial)
    world.complete("first", PROMPT)
    other = [*PROMPT[:5], 96, *PROMPT[6:]]
    assert world.complete("other", other) == [(start, 128)]


def test_a_gap_whose_record_is_gone_proves_nothing_after_it() -> None:
    world = World()
    world.complete("first", PROMPT)
    world.tree.lose_record(world.node(PROMPT, 2))
    world.check()
    assert world.complete("again", PROMPT) == [(32, 128)]
    world.check()
    assert world.complete("once more", PROMPT) == [(127, 128)]


def test_a_budget_cuts_the_highest_positions() -> None:
    world = World(budget=32)
    world.complete("first", PROMPT)
    world.drop(PROMPT, 1, 5)
    before = len(world.steps)
    world.complete("again", PROMPT)
    assert world.steps[before:] == [[("again", 16, 32), ("again", 80, 96)], [("again", 127, 128)]]


@pytest.mark.parametrize("partial", [True, False])
def test_dropped_while_decoding(partial: bool) -> None:
    world = World(partial_reuse=partial)
    world.add("a", PROMPT, max_tokens=40)
    for _ in range(20):
        world.step()
    world.drop(PROMPT, 2)
    before = len(world.steps)
    world.step()
    assert world.steps[before] == [("a", 32, 48), ("a", 147, 148)]
    world.check()
    world.run()
    assert world.tokens["a"] == dense(PROMPT, 40)
    assert world.scheduler.totals.recomputed_tokens == 16


@pytest.mark.parametrize(("partial", "start"), [(True, 31), (False, 16)])
def test_exactly_two_blocks_warm(partial: bool, start: int) -> None:
    world = World(partial_reuse=partial)
    world.complete("first", PROMPT[:32])
    assert world.complete("again", PROMPT[:32]) == [(start, 32)]
    world.check()


@pytest.mark.parametrize(("partial", "start"), [(True, 9), (False, 0)])
def test_ten_tokens_twice(partial: bool, start: int) -> None:
    world = World(partial_reuse=partial)
    world.complete("first", PROMPT[:10])
    assert world.complete("again", PROMPT[:10]) == [(start, 10)]


@pytest.mark.parametrize(("partial", "start"), [(True, 149), (False, 144)])
def test_next_chat_turn(partial: bool, start: int) -> None:
    world = World(partial_reuse=partial)
    prompt = [*PROMPT, 1, 2]
    world.complete("turn 1", prompt, max_tokens=20)
    longer = prompt + world.tokens["turn 1"] + list(range(40))
    assert world.complete("turn 2", longer) == [(start, 190)]
    assert world.tokens["turn 2"] == dense(longer, 1)
