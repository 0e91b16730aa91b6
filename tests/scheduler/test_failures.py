"""A step that fails, and logits that are not finite: who fails with them, and what becomes of the K/V."""

from __future__ import annotations

import pytest

from scheduler.messages import FinishReason
from scheduler.scheduler import Sampled
from tests.scheduler.world import World, dense

P = list(range(64))


def small(num_blocks: int = 16, **options: object) -> World:
    return World(num_blocks=num_blocks, block_size=4, **options)  # type: ignore[arg-type]


def test_a_failed_step_fails_its_own_requests_only() -> None:
    world = small(budget=8)
    world.add("in the batch", P[:8], 3)
    world.add("waits", P[20:28], 3)
    batch = world.step(fail=True)
    assert [request.request_id for request in batch.requests] == ["in the batch"]
    assert world.ends["in the batch"] == [FinishReason.ERROR]
    assert world.outputs["in the batch"][-1].error == "made to fail"
    world.check()
    world.run()
    assert world.tokens["waits"] == dense(P[20:28], 3)
    assert world.scheduler.totals.failed_steps == 1


def test_nothing_of_a_failed_step_is_kept() -> None:
    world = small(budget=6)
    world.add("a", P[:10], 3)
    world.step()  # block 0 is full and published, block 1 has two slots
    world.step(fail=True)
    world.check()
    assert world.complete("again", P[:10]) == [(4, 10)], "the first step succeeded, so its full block stays"
    assert world.tokens["again"] == dense(P[:10], 1)


@pytest.mark.parametrize(("held", "first"), [(False, 0), (True, 2)])
def test_a_failed_steps_blocks_are_zeroed_but_for_the_valid_slots_of_one_still_held(held: bool, first: int) -> None:
    world = small(budget=6)
    world.add("a", P[:10], 3)
    world.step()
    batch = world.scheduler.schedule(world.clock)
    block = batch.spans[0].request.table[1]
    assert block is not None and block.written == 2
    if held:
        world.pool.share(block)  # by one that is not in the batch
    world.scheduler.fail(batch, "made to fail", world.clock)
    assert (block.block_id, first) in world.scheduler.to_zero
    assert len(world.scheduler.to_zero) == len(batch.planned)


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    world = small()
    world.add("bad", P[:10], 5)
    world.add("good", P[20:30], 5)
    world.step()
    world.step(broken="bad")
    assert world.ends["bad"] == [FinishReason.ERROR] and not world.ends["good"]
    assert world.outputs["bad"][-1].error == "not finite"
    world.check()
    world.run()
    assert world.tokens["good"] == dense(P[20:30], 5)
    assert world.tokens["bad"] == dense(P[:10], 5)[:1]


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_what_a_request_with_bad_logits_computed_is_not_used_again(budget: int) -> None:
    """Also the chunks before the one whose logits were seen: nobody knows where the damage began."""
    world = small(budget=budget)
    world.add("bad", P[:10], 5)
    while not world.ends["bad"]:
        world.step(broken="bad")
        world.check()
    assert world.ends["bad"] == [FinishReason.ERROR]
    assert world.complete("again", P[:10], 5)[0] == (0, min(budget, 10))
    assert world.tokens["again"] == dense(P[:10], 5)


def test_what_it_did_not_compute_itself_stays() -> None:
    world = small()
    world.complete("before", P[:8])
    world.add("bad", [*P[:8], 50, 51, 52], 5)
    world.step(broken="bad")
    world.check()
    assert world.complete("again", [*P[:8], 50, 51, 52]) == [(8, 11)]


BAD, SHARER = [*P[:8], 50], [*P[:8], 51, 52, 53, 54]


def shared_and_broken(num_blocks: int = 16) -> World:
    """`bad` writes NaN into two blocks that `sharer`, admitted in the same step, holds too and never computed."""
    world = small(num_blocks=num_blocks, budget=10)
    world.add("bad", BAD, 2)
    world.add("sharer", SHARER, 2)
    world.step(broken="bad")
    assert world.steps == [[("bad", 0, 9), ("sharer", 8, 9)]]
    assert world.ends["bad"] == [FinishReason.ERROR] and not world.ends["sharer"]
    world.check()
    return world


@pytest.mark.parametrize("length", [2, 6, 10, 14])
@pytest.mark.parametrize("aborted", [True, False])
def test_a_bad_block_is_zeroed_when_its_last_holder_lets_go(aborted: bool, length: int) -> None:
    """The sharer never computed the bad blocks, so they are not among its own suspects. By its length the next prompt
    uses one after the other of the four blocks only in part: nothing may be left in the other slots."""
    world = shared_and_broken(num_blocks=4)
    if aborted:
        world.abort("sharer")
    world.run()
    assert world.ends["sharer"] == [FinishReason.ABORT if aborted else FinishReason.ERROR]
    prompt = P[30 : 30 + length]
    world.complete("next", prompt)
    assert world.tokens["next"] == dense(prompt, 1)
    world.check()


def test_a_holder_of_bad_blocks_publishes_nothing() -> None:
    world = shared_and_broken()
    world.run()
    world.check()
    assert world.ends["sharer"] == [FinishReason.ERROR]
    assert world.complete("again", SHARER) == [(0, 10), (10, 12)]
    assert world.tokens["again"] == dense(SHARER, 1)


def test_a_request_that_left_itself_nothing_to_choose_fails_and_its_kv_stay() -> None:
    world = small()
    world.add("strict", P[:10], 5)
    world._run = lambda batch: (  # type: ignore[method-assign]
        world._write(batch, set()),
        {request.request_id: Sampled(error="nothing left") for request in batch.sampled},
    )[1]
    world.step()
    del world._run  # type: ignore[method-assign]
    world.check()
    assert world.ends["strict"] == [FinishReason.ERROR] and world.outputs["strict"][-1].error == "nothing left"
    assert not world.scheduler.to_zero
    assert world.complete("again", P[:10]) == [(8, 10)]
    assert world.tokens["again"] == dense(P[:10], 1)
