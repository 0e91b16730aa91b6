"""Schedules made to break the span rules: every one has an exact, expected course and the dense reference's tokens."""

from __future__ import annotations

import random

import pytest

from scheduler.messages import FinishReason
from scheduler.scheduler import RequestRefused
from tests.scheduler.world import World, dense

PROMPT = list(range(64))


def test_two_holders_of_a_gap_larger_than_the_budget() -> None:
    """The holder that is served first writes the gap, step by step; the other waits and never computes any of it."""
    world = World(budget=6)
    world.add("low", PROMPT, 30, priority=1)
    while not world.tokens["low"]:
        world.step()
    world.add("high", [*PROMPT, 1], 30, priority=0)
    while not world.tokens["high"]:
        world.step()
    world.drop(PROMPT, 1)
    before = len(world.steps)
    low, high = 63 + len(world.tokens["low"]), 64 + len(world.tokens["high"])  # the next position of each
    for _ in range(4):
        world.step()
        world.check()
    assert world.steps[before:] == [
        [("high", 16, 22)],
        [("high", 22, 28)],
        [("high", 28, 32), ("high", high, high + 1), ("low", low, low + 1)],
        [("high", high + 1, high + 2), ("low", low + 1, low + 2)],
    ]
    world.run()
    assert world.tokens["low"] == dense(PROMPT, 30)
    assert world.tokens["high"] == dense([*PROMPT, 1], 30)


def test_a_gap_begun_by_one_holder_is_gone_on_with_by_the_other() -> None:
    """The lower-priority holder starts the repair alone; the other arrives, outranks it, and goes on from `written`."""
    world = World(budget=6)
    world.complete("first", PROMPT)
    world.drop(PROMPT, 1)
    before = len(world.steps)
    world.add("low", [*PROMPT, 1], 3, priority=1)
    world.step()
    world.add("high", [*PROMPT, 2], 3, priority=0)
    world.step()  # the budget is spent before anyone else is admitted
    world.step()
    assert world.steps[before : before + 3] == [
        [("low", 16, 22)],
        [("low", 22, 28)],
        [("low", 28, 32), ("low", 64, 65), ("high", 64, 65)],
    ]
    world.run()
    assert world.tokens["low"] == dense([*PROMPT, 1], 3)
    assert world.tokens["high"] == dense([*PROMPT, 2], 3)


def test_the_writer_is_aborted_mid_prefill_while_a_sharer_waits() -> None:
    """What the writer left is not lost: its full block is reused, the written slots of the next one are copied."""
    world = World(budget=24)
    world.add("writer", [*PROMPT, 1], 3)
    world.step()
    world.add("sharer", [*PROMPT, 2], 3)
    world.abort("writer")
    world.check()
    world.run()
    assert world.computed("sharer") == [(24, 48), (48, 65), (65, 66), (66, 67)]
    usage = world.outputs["sharer"][0].usage
    assert usage is not None and (usage.reused, usage.copied, usage.computed) == (16, 8, 41)
    assert world.ends["writer"] == [FinishReason.ABORT]
    assert world.tokens["sharer"] == dense([*PROMPT, 2], 3)


@pytest.mark.parametrize("how", ["abort", "fail", "preempt"])
def test_the_writer_leaves_mid_repair_and_the_other_holder_goes_on(how: str) -> None:
    """A gap of both is half repaired when the one that was at it is gone. What it left as a tail is copied; what a
    failed request left is not trusted."""
    world = World(budget=6)
    world.add("other", [*PROMPT, 2], 30, priority=1)
    while not world.tokens["other"]:
        world.step()
    world.add("writer", [*PROMPT, 1], 30, priority=0)
    while not world.tokens["writer"]:
        world.step()
    world.drop(PROMPT, 1)
    world.step()
    assert world.steps[-1] == [("writer", 16, 22)]
    before = len(world.steps)
    if how == "abort":
        world.abort("writer")
    elif how == "fail":
        world.step(fail=True)
        before += 1
    else:
        writer = world.scheduler.running[0]
        world.scheduler._preempt(writer, world.clock)
        world.scheduler.waiting.clear()
        del world.scheduler._requests["writer"]
    world.check()
    following = 64 + len(world.tokens["other"])
    world.step()
    world.step()
    if how == "fail":
        assert world.steps[before:] == [[("other", 16, 22)], [("other", 22, 28)]]
    else:
        assert world.steps[before:] == [[("other", 22, 28)], [("other", 28, 32), ("other", following, following + 1)]]
    world.run()
    world.check()
    assert world.tokens["other"] == dense([*PROMPT, 2], 30)


def test_equal_prefixes_arriving_together_are_computed_once() -> None:
    world = World()
    for number in range(4):
        world.add(f"r{number}", [*PROMPT, number], 2)
    world.step()
    assert world.steps == [[("r0", 0, 65), ("r1", 64, 65), ("r2", 64, 65), ("r3", 64, 65)]]
    world.run()
    for number in range(4):
        assert world.tokens[f"r{number}"] == dense([*PROMPT, number], 2)
        usage = world.outputs[f"r{number}"][0].usage
        assert usage is not None and usage.cached_tokens == (0 if number == 0 else 64)


def test_a_preempted_request_whose_prefix_was_partly_evicted() -> None:
    """The newer request is preempted for the older one's growth; part of what it left is evicted; it resumes on the
    rest and computes exactly what is missing."""
    world = World(num_blocks=8, block_size=4)
    older, newer = list(range(14)), list(range(20, 33))
    world.add("older", older, 14)
    world.add("newer", newer, 6)
    while not world.scheduler.totals.preemptions:
        world.step()
        world.check()
    assert [request.request_id for request in world.scheduler.waiting] == ["newer"]
    world.run()
    resumed = [span for span in world.computed("newer") if span[0] < 13][1:]
    kept = world.outputs["newer"][0].usage
    assert kept is not None and kept.computed == 13
    assert resumed, "nothing had to be computed again: the test shows nothing"
    assert resumed[0][0] > 0, "everything was computed again: the test shows nothing"
    assert world.tokens["older"] == dense(older, 14)
    assert world.tokens["newer"] == dense(newer, 6)
    assert world.scheduler.totals.recomputed_tokens > 0


def test_growth_that_fills_the_pool_alone() -> None:
    world = World(num_blocks=8, block_size=4)
    world.complete("old", list(range(40, 60)))
    world.add("alone", list(range(5)), 27)
    world.add("waits", list(range(60, 80)), 2)
    world.run()
    assert world.tokens["alone"] == dense(list(range(5)), 27)
    assert world.tokens["waits"] == dense(list(range(60, 80)), 2)
    with pytest.raises(RequestRefused, match="5 prompt tokens and max_tokens 28 exceed the maximum of 32"):
        world.add("too long", list(range(5)), 28)


def test_a_long_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    world = World(num_blocks=8, block_size=4, budget=4)
    world.add("running", list(range(10)), 12)
    world.step()
    world.add("long", list(range(50, 78)), 2)
    while not world.ends["running"]:
        assert not any(request.request_id == "long" for request in world.scheduler.running)
        world.step()
    world.run()
    assert world.scheduler.totals.preemptions == 0
    assert world.tokens["long"] == dense(list(range(50, 78)), 2)


def test_a_copy_is_given_up_rather_than_a_block() -> None:
    """A warm prompt that fills the pool: the only block left for its end is the one it would copy from."""
    world = World(num_blocks=2, block_size=4)
    prompt = list(range(8))
    with pytest.raises(RequestRefused):
        world.add("too long", prompt)
    world.complete("first", prompt[:7])
    assert world.complete("again", prompt[:7]) == [(4, 7)]
    world.check()
    roomy = World(num_blocks=3, block_size=4)
    roomy.complete("first", prompt[:7])
    assert roomy.complete("again", prompt[:7]) == [(6, 7)]


@pytest.mark.parametrize("seed", range(200))
def test_sharers_and_repair(seed: int) -> None:
    """Eight requests share a prefix; a shared block is dropped at a random step: all outputs are as undisturbed."""
    rng = random.Random(seed)
    world = World(num_blocks=48, block_size=4, budget=rng.choice([5, 16, 64]))
    prompts = [PROMPT[:40] + [number] * rng.randint(1, 6) for number in range(8)]
    for number, prompt in enumerate(prompts):
        world.add(f"r{number}", prompt, 10, priority=rng.randint(0, 1))
    for _ in range(rng.randint(1, 12)):
        world.step()
    node = world.node(PROMPT, rng.randrange(10))
    if node is not None:
        world.scheduler.drop(node)
    world.check()
    world.run()
    world.check()
    for number, prompt in enumerate(prompts):
        assert world.tokens[f"r{number}"] == dense(prompt, 10)
