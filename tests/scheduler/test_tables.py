"""What a request holds of the cache: who may find its blocks, what it waits for, what it leaves."""

from __future__ import annotations

import pytest

from tests.scheduler.world import World, dense

P = list(range(40))


@pytest.mark.parametrize("length", [7, 8, 9])
def test_only_blocks_before_the_last_may_be_shared_while_they_are_written(length: int) -> None:
    """Were another request to write the last block whole, its last position would have K/V and no logits."""
    world = World(block_size=4, budget=3)
    world.add("a", P[:length], 2)
    world.step()
    table = world.scheduler.running[0].table
    found = [block is not None and block.node is not None for block in table]
    assert found == [True] * (len(table) - 1) + [False]
    world.run()
    assert world.tokens["a"] == dense(P[:length], 2)


def test_all_blocks_of_a_prompt_are_allocated_when_it_is_admitted() -> None:
    world = World(block_size=4, budget=3)
    world.add("a", P[:15], 2)
    world.step()
    assert world.pool.in_use == 4


def test_a_wholly_cached_prompt_needs_a_block_for_its_last_position() -> None:
    """It cannot be written into the published one."""
    world = World(block_size=4, num_blocks=3)
    world.complete("first", P[:8])
    assert world.pool.available == 3
    world.add("again", P[:8], 2)
    batch = world.step()
    assert world.computed("again") == [(7, 8)]
    assert [copy.slots for copy in batch.copies] == [3] and world.pool.in_use == 2
    world.run()
    assert world.tokens["again"] == dense(P[:8], 2)


def test_a_requests_own_matches_do_not_count_as_evictable() -> None:
    """Six blocks of twelve are its own prefix: the six others must do for the rest, and they are in use."""
    world = World(block_size=4, num_blocks=12)
    world.complete("first", P[:24])
    world.add("busy", [50 + token for token in range(16)], 8)
    world.step()
    world.add("again", [*P[:24], *range(60, 72)], 1)
    world.step()
    assert [request.request_id for request in world.scheduler.waiting] == ["again"]
    world.run()
    world.check()
    assert world.computed("again") == [(24, 36)]


def test_copies_hold_their_sources_until_the_step_is_over() -> None:
    world = World(block_size=4)
    world.complete("first", P[:7])
    world.add("again", [*P[:6], 90, 91], 1)
    batch = world.scheduler.schedule(world.clock)
    (copy,) = batch.copies
    assert (copy.slots, copy.source.ref_count, copy.source.published) == (2, 1, True)
    world.deliver(world.scheduler.update(batch, world._run(batch), world.clock))
    assert copy.source.ref_count == 0
    world.check()


def test_sources_of_copies_are_let_go_when_the_request_gives_way() -> None:
    """Two gaps: the first is filled with a copy, for the second there is no block, and the request is the newest."""
    world = World(block_size=4, num_blocks=5)
    world.complete("sibling", [*P[:2], 90, 91])
    world.add("older", [60, 61, 62, 63], 6)
    world.add("newest", P[:9], 4)
    world.step()
    world.drop(P, 0, 1)
    world.step()  # the older one takes a block, which leaves one and the sibling
    assert [request.request_id for request in world.scheduler.waiting] == ["newest"]
    world.check()
    world.run()
    assert world.tokens["newest"] == dense(P[:9], 4)
    world.check()


def test_a_twin_that_was_published_first_is_switched_to() -> None:
    """Two prompts end in the same block, each computes it for its last position; one copy of it is kept."""
    world = World(block_size=4)
    world.add("a", P[:8], 3)
    world.add("b", P[:8], 3)
    world.step()
    first, second = world.scheduler.running
    assert first.table[1] is second.table[1] and first.table[1] is not None and first.table[1].ref_count == 2
    world.check()
    world.run()
    assert world.tokens["a"] == world.tokens["b"] == dense(P[:8], 3)


def test_a_detached_request_leaves_nothing() -> None:
    world = World(block_size=4)
    world.add("a", P[:10], 9)
    for _ in range(3):
        world.step()
    world.scheduler.invalidate(world.node(P, 1))
    world.run()
    assert world.tokens["a"] == dense(P[:10], 9)
    assert len(world.tree) == 1 and world.pool.cached == 1, "block 0 alone is true still"
    world.check()


def test_a_detached_request_that_is_preempted_computes_all_of_it_again() -> None:
    world = World(block_size=4)
    world.add("a", P[:10], 9)
    world.step()
    world.scheduler.invalidate(world.node(P, 1))
    world.scheduler._preempt(world.scheduler.running[0], world.clock)
    before = len(world.steps)
    world.step()
    assert world.steps[before] == [("a", 0, 11)]
    world.run()
    assert world.tokens["a"] == dense(P[:10], 9) and world.pool.cached == 1


def test_a_detached_request_finds_nothing_new_below_what_was_invalidated() -> None:
    """It never mixes versions: what another request computes meanwhile is of the new one."""
    world = World(block_size=4)
    world.add("old", P[:10], 12)
    world.step()
    world.scheduler.invalidate(world.node(P, 0))
    world.complete("new", P[:10])
    old = world.scheduler.running[0] if world.scheduler.running else None
    assert old is None or old.detached
    for found in world.computed("new"):
        assert found[0] == 0 or found[0] >= 10
    assert world.tokens["old"] == dense(P[:10], 12)
    world.check()


def test_a_dropped_block_is_computed_once_for_all_its_holders() -> None:
    world = World(block_size=4)
    for number in range(3):
        world.add(f"r{number}", [*P[:8], 60 + number], 9)
    world.step()
    world.drop(P, 0)
    world.check()
    before = len(world.steps)
    world.step()
    assert [span for span in world.steps[before] if span[2] <= 8] == [("r0", 0, 4)]
    tables = [request.table[0] for request in world.scheduler.running]
    assert tables[0] is tables[1] is tables[2] and tables[0] is not None and tables[0].ref_count == 3
    world.run()
    for number in range(3):
        assert world.tokens[f"r{number}"] == dense([*P[:8], 60 + number], 9)


def test_a_block_that_came_back_meanwhile_fills_the_gap() -> None:
    """The drop came while the holder waited for the budget; another one has published it again by then."""
    world = World(block_size=4, budget=6)
    world.add("second", [*P[:8], 60], 9, priority=1)
    while not world.tokens["second"]:
        world.step()
    world.add("first", [*P[:8], 61], 9, priority=0)
    while not world.tokens["first"]:
        world.step()
    world.drop(P, 0, 1)
    world.run()
    computed = [min(end, 8) - start for step in world.steps for _, start, end in step if start < 8]
    assert sum(computed) == 16, "eight at first, eight repaired, none of them twice"
    assert world.tokens["second"] == dense([*P[:8], 60], 9)
    assert world.tokens["first"] == dense([*P[:8], 61], 9)


def test_colliding_blocks_are_computed_and_not_published() -> None:
    world = World(block_size=4, hash_bits=8, num_blocks=64)
    prompts = [[token, 1, 2, 3, 4, 5, 6, 7, 8] for token in range(97)]
    for number in range(0, 97, 2):
        world.complete(f"r{number}", prompts[number])
        assert world.tokens[f"r{number}"] == dense(prompts[number], 1)
    assert world.tree.collisions > 0
    world.check()
