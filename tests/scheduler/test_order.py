"""Who is served first, who is preempted, how many run at once."""

from __future__ import annotations

import pytest

from scheduler.messages import FinishReason
from scheduler.scheduler import RequestRefused
from tests.scheduler.world import World, dense


def prompt(start: int, length: int) -> list[int]:
    """Prompts of different starts share nothing."""
    return [start + 90 * index for index in range(length)]


def names(requests) -> list[str]:  # type: ignore[no-untyped-def]
    return [request.request_id for request in requests]


def test_first_come_first_served() -> None:
    world = World(budget=10)
    for number in range(4):
        world.add(f"r{number}", prompt(number, 10), 1)
    world.run()
    assert world.steps == [[(f"r{number}", 0, 10)] for number in range(4)]


def test_a_lower_number_is_served_before_an_earlier_arrival() -> None:
    world = World(max_num_seqs=1)
    for name, priority in [("third", 1), ("second", 0), ("fourth", 1), ("first", -1)]:
        world.add(name, prompt(len(name), 5), 1, priority)
    order = []
    while world.scheduler.has_work:
        world.step()
        order += [who for who, _, _ in world.steps[-1]]
    assert order == ["first", "second", "third", "fourth"]


def test_priority_holds_among_running_requests_too() -> None:
    world = World(budget=8)
    world.add("low", prompt(1, 12), 3, priority=5)
    world.step()
    world.add("high", prompt(2, 12), 3, priority=0)
    world.step()
    assert world.steps[-1] == [("low", 8, 12), ("high", 0, 4)], "what runs is not stopped for a newcomer"
    world.step()
    assert world.steps[-1] == [("high", 4, 12)], "but from now on it comes second"
    world.run()
    assert world.tokens["low"] == dense(prompt(1, 12), 3)


def test_at_most_max_num_seqs_run() -> None:
    world = World(max_num_seqs=3)
    for number in range(7):
        world.add(f"r{number}", prompt(number, 4), 2 + number % 3)
    seen = set()
    while world.scheduler.has_work:
        world.step()
        seen.add(len(names(world.scheduler.running)))
        assert len(world.steps[-1]) <= 3
    assert max(seen) <= 3
    assert all(world.tokens[f"r{number}"] == dense(prompt(number, 4), 2 + number % 3) for number in range(7))


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """A short prompt that would fit waits behind a long one that does not, or the long one would starve."""
    world = World(num_blocks=6, block_size=4)
    world.add("running", prompt(1, 12), 6)
    world.step()
    world.add("long", prompt(2, 18), 2)
    world.add("short", prompt(3, 3), 1)
    world.step()
    assert names(world.scheduler.waiting) == ["long", "short"]
    world.run()
    assert all(world.ends[name] == [FinishReason.LENGTH] for name in world.ends)


START = {"oldest": 1, "older": 2, "newest": 3, "unimportant": 4}


def until_preempted(world: World) -> list[str]:
    for _ in range(200):
        world.step()
        world.check()
        if world.scheduler.totals.preemptions:
            return names(world.scheduler.waiting)
    raise AssertionError("nobody was preempted")


def test_the_newest_is_preempted() -> None:
    world = World(num_blocks=9, block_size=4)
    for name in ("oldest", "older", "newest"):
        world.add(name, prompt(START[name], 10), 14)
    assert until_preempted(world) == ["newest"]
    world.run()
    assert all(world.tokens[name] == dense(prompt(START[name], 10), 14) for name in world.ends)


def test_the_lowest_priority_is_preempted_before_the_newest() -> None:
    world = World(num_blocks=9, block_size=4)
    for name, priority in [("unimportant", 2), ("older", 0), ("newest", 1)]:
        world.add(name, prompt(START[name], 10), 14, priority)
    assert until_preempted(world) == ["unimportant"]
    world.run()
    assert all(world.tokens[name] == dense(prompt(START[name], 10), 14) for name in world.ends)


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    world = World(num_blocks=9, block_size=4)
    for name in ("oldest", "older", "newest"):
        world.add(name, prompt(START[name], 10), 14)
    world.step()
    world.add("came later", prompt(33, 4), 1)
    until_preempted(world)
    assert names(world.scheduler.waiting) == ["newest", "came later"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """Else the blocks that were just made free would go to a newcomer, and the step after would preempt again."""
    world = World(num_blocks=9, block_size=4)
    for name in ("oldest", "older", "newest"):
        world.add(name, prompt(START[name], 10), 14)
    world.step()
    world.add("tiny", prompt(33, 1), 1, priority=0)
    until_preempted(world)
    assert "tiny" not in names(world.scheduler.running)


def test_a_request_may_be_the_one_it_preempts() -> None:
    """The newest needs a block and there is none: it gives up its own."""
    world = World(num_blocks=4, block_size=4)
    world.add("older", prompt(1, 7), 8)
    world.add("newest", prompt(2, 8), 4)
    assert until_preempted(world) == ["newest"]
    world.run()
    assert world.tokens["newest"] == dense(prompt(2, 8), 4)
    assert world.tokens["older"] == dense(prompt(1, 7), 8)


def test_a_preempted_request_takes_up_again_what_it_left() -> None:
    """Its blocks stay cached, its tail too: where nobody needed them, only the next position is computed."""
    world = World(num_blocks=32, block_size=4)
    world.add("a", prompt(1, 10), 10)
    for _ in range(3):
        world.step()
    world.scheduler._preempt(world.scheduler.running[0], world.clock)
    world.check()
    world.step()
    assert world.steps[-1] == [("a", 12, 13)]
    world.run()
    assert world.tokens["a"] == dense(prompt(1, 10), 10)
    assert world.scheduler.totals.recomputed_tokens == 0


@pytest.mark.parametrize("partial", [True, False])
def test_recomputed_positions_are_counted(partial: bool) -> None:
    world = World(num_blocks=32, block_size=4, partial_reuse=partial)
    world.add("a", prompt(1, 10), 10)
    for _ in range(3):
        world.step()
    world.scheduler._preempt(world.scheduler.running[0], world.clock)
    world.drop(prompt(1, 10), 0)
    world.step()
    assert world.steps[-1] == [("a", 0, 4), ("a", 12, 13)]
    assert world.scheduler.totals.recomputed_tokens == 4
    world.run()
    usage = world.outputs["a"][0].usage
    assert usage is not None and usage.computed == 10, "fixed when the prefill first ended"


# -- refusals and ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1], 0, "max_tokens must be at least 1, not 0"),
        ([1], -3, "max_tokens must be at least 1, not -3"),
        ([1] * 30, 3, "30 prompt tokens and max_tokens 3 exceed the maximum of 32 tokens"),
    ],
)
def test_what_could_never_run_is_refused(tokens: list[int], max_tokens: int, message: str) -> None:
    world = World(num_blocks=8, block_size=4)
    with pytest.raises(RequestRefused, match=message):
        world.add("refused", tokens, max_tokens)
    assert not world.scheduler.has_work
    world.check()
    world.add("fits", [1] * 30, 2)
    world.run()
    assert len(world.tokens["fits"]) == 2


def test_an_id_in_use_is_refused_and_may_be_used_again_afterwards() -> None:
    world = World()
    world.add("a", [1, 2], 1)
    with pytest.raises(RequestRefused, match="'a' is in use"):
        world.add("a", [3], 1)
    world.run()
    assert world.complete("a", [3, 4]) == [(0, 2)]


def test_abort_in_every_state() -> None:
    world = World(max_num_seqs=2, budget=8, num_blocks=8, block_size=4)
    for number in range(3):
        world.add(f"r{number}", prompt(number, 10), 5)
    world.step()
    world.abort("r0")  # amid its prefill
    world.abort("r2")  # waiting
    world.step(), world.step()
    world.scheduler._preempt(world.scheduler.running[0], world.clock)
    world.abort("r1")  # preempted
    assert world.scheduler.abort("r1", world.clock) is None, "it has just ended"
    assert world.scheduler.abort("unknown", world.clock) is None
    world.check()
    assert all(ends == [FinishReason.ABORT] for ends in world.ends.values())
    assert world.pool.in_use == 0 and not world.scheduler.has_work


def test_abort_all() -> None:
    world = World(max_num_seqs=2)
    for number in range(3):
        world.add(f"r{number}", prompt(number, 10), 5)
    world.step()
    outputs = world.scheduler.abort_all(world.clock)
    assert sorted(output.request_id for output in outputs) == ["r0", "r1", "r2"]
    assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}
    world.check()
    assert world.pool.in_use == 0 and not world.scheduler.has_work


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    tokens = dense(prompt(1, 5), 8)
    stop = tokens[3]
    first = tokens.index(stop)
    world = World()
    world.add("a", prompt(1, 5), 8, stop_token_ids=(stop,))
    world.run()
    last = world.outputs["a"][-1]
    assert world.tokens["a"] == tokens[: first + 1]
    assert last.finish_reason is FinishReason.STOP and last.stop_token_id == stop


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 1), ({"ignore_eos": True}, 4), ({"min_tokens": 3}, 3)],
)
def test_end_of_sequence(options: dict[str, object], count: int) -> None:
    """Every token is an end of sequence here; before min_tokens the sampler would not have drawn one."""
    world = World(eos=tuple(range(97)))
    world.add("a", prompt(1, 5), 4, **options)
    world.run()
    last = world.outputs["a"][-1]
    assert len(world.tokens["a"]) == count
    assert last.finish_reason is (FinishReason.LENGTH if "ignore_eos" in options else FinishReason.STOP)
    assert last.stop_token_id is None


def test_times_and_counts_of_outputs() -> None:
    """The world's clock ticks once a step."""
    world = World(max_num_seqs=1)
    world.add("a", prompt(1, 5), 3)
    world.add("b", prompt(2, 5), 1)
    world.run()
    first, second, last = world.outputs["a"]
    assert first.time_to_first_token == 1.0 and first.usage is not None and first.usage.computed == 5
    assert second.inter_token == 1.0 and second.usage is None and second.time_to_first_token is None
    assert [output.num_generated for output in world.outputs["a"]] == [1, 2, 3]
    assert last.times is not None and (last.times.queued, last.times.prefill, last.times.decode) == (1.0, 0.0, 2.0)
    only = world.outputs["b"][0]
    assert only.times is not None and (only.times.queued, only.times.e2e, only.times.decode) == (4.0, 4.0, 0.0)
