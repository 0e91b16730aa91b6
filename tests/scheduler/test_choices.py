"""Several choices of one prompt: the first computes it, the others take it over, and never wait for one that left."""

from __future__ import annotations

import pytest

from scheduler.messages import CacheControl, FinishReason
from tests.scheduler.world import World, dense

PROMPT = list(range(40))  # two full blocks of 16, and half of one


def choices(world: World, count: int, prompt: list[int] = PROMPT, max_tokens: int = 4, **options: object) -> list[str]:
    names = [f"c{number}" for number in range(count)]
    for name in names:
        after = None if name == names[0] else names[0]
        world.add(name, prompt, max_tokens, after=after, **options)  # type: ignore[arg-type]
    return names


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
def test_the_others_compute_the_last_position_alone(length: int) -> None:
    world = World()
    prompt = PROMPT[:length]
    names = choices(world, 3, prompt)
    world.step()
    assert world.steps == [[("c0", 0, length)]], "nobody computes the prompt beside the first"
    world.step()
    assert world.steps[1] == [("c0", length, length + 1), ("c1", length - 1, length), ("c2", length - 1, length)]
    world.run()
    world.check()
    for name in names:
        assert world.tokens[name] == dense(prompt, 4)
    usages = [world.outputs[name][0].usage for name in names]
    assert [usage.computed for usage in usages if usage is not None] == [length, 1, 1]


def test_without_partial_reuse_each_computes_what_is_no_full_block() -> None:
    world = World(partial_reuse=False)
    choices(world, 2)
    world.run()
    assert world.computed("c1")[0] == (32, 40)
    assert world.tokens["c1"] == dense(PROMPT, 4)


def test_they_wait_for_a_prefill_of_many_steps() -> None:
    world = World(budget=10)
    names = choices(world, 3)
    world.run()
    first = next(step for step, spans in enumerate(world.steps) if any(who == "c1" for who, _, _ in spans))
    assert world.steps[:4] == [[("c0", 0, 10)], [("c0", 10, 20)], [("c0", 20, 30)], [("c0", 30, 40)]]
    assert first == 4
    assert all(world.tokens[name] == dense(PROMPT, 4) for name in names)


def test_others_do_not_wait_behind_them() -> None:
    world = World(budget=10)
    choices(world, 3)
    world.add("other", [50], 1)
    world.step()
    world.step()
    assert [request.request_id for request in world.scheduler.waiting] == ["c1", "c2", "other"], "no budget was left"
    world = World(budget=30)
    choices(world, 3)
    world.step()
    world.add("other", [50], 1)
    world.step()
    assert ("other", 0, 1) in world.steps[-1] and not any(who == "c1" for who, _, _ in world.steps[-1])


@pytest.mark.parametrize("how", ["abort", "fail", "break"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_first_leaves_before_its_prefill_has_ended(how: str, steps: int) -> None:
    world = World(budget=15)
    names = choices(world, 3)
    for _ in range(steps):
        world.step()
    if how == "abort":
        world.abort("c0")
    elif how == "fail":
        world.step(fail=True)
    else:
        world.step(broken="c0")
    world.run()
    world.check()
    assert len(world.ends["c0"]) == 1
    for name in names[1:]:
        assert world.tokens[name] == dense(PROMPT, 4) and world.ends[name] == [FinishReason.LENGTH]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("how", ["drop", "invalidate"])
@pytest.mark.parametrize("recovery", ["repair", "truncate"])
def test_blocks_go_before_the_others_have_them(how: str, index: int, recovery: str) -> None:
    world = World(recovery=recovery)
    names = choices(world, 2)
    world.step()
    if how == "drop":
        world.drop(PROMPT, index)
    else:
        node = world.node(PROMPT, index)
        assert node is not None
        world.scheduler.invalidate(node)
    world.run()
    world.check()
    assert all(world.tokens[name] == dense(PROMPT, 4) for name in names)
    # A running request repairs its own gaps, and the others share the block while it does.
    assert world.computed("c1")[0] == ((39, 40) if how == "drop" else (16 * index, 40))


def test_a_copy_is_forgotten_with_what_the_first_had_copied() -> None:
    """c0 copied the beginning of its last block from another prompt's; c1 has it from c0."""
    world = World()
    world.complete("old", [*PROMPT[:36], 90, 91, 92, 93])
    names = choices(world, 2)
    world.step()
    assert world.computed("c0") == [(36, 40)]
    world.step()
    copy = next(request for request in world.scheduler.running if request.request_id == "c1").table[2]
    assert copy is not None
    origin = next(source.node for source in copy.lineage.sources if source.node is not None)
    world.scheduler.invalidate(origin)
    assert all(request.detached for request in world.scheduler.running)
    world.run()
    world.check()
    assert all(world.tokens[name] == dense(PROMPT, 4) for name in names)


def test_the_first_is_preempted_before_the_others_come() -> None:
    world = World(num_blocks=5, block_size=16)
    world.add("big", [60] * 28, 12, priority=-1)
    world.step()
    names = choices(world, 3, max_tokens=6)
    for _ in range(6):
        world.step()
        world.check()
    world.run()
    assert world.scheduler.totals.preemptions > 0
    assert all(world.tokens[name] == dense(PROMPT, 6) for name in names)


def test_one_that_is_resumed_takes_no_more_than_the_prompt_from_the_first() -> None:
    """By then it has tokens of its own, which sampling may have made others than the first one's."""
    world = World(num_blocks=8, block_size=16)
    choices(world, 2, max_tokens=20)
    world.step()
    world.step()
    world.step()
    request = next(request for request in world.scheduler.running if request.request_id == "c1")
    world.scheduler._send_back(request, world.clock, keep_tails=False)  # as under pressure
    world.step()
    assert world.steps[-1][1] == ("c1", 40, 42)
    world.run()
    assert world.tokens["c1"] == dense(PROMPT, 20)


def test_what_is_not_written_for_others_is_not_taken_over() -> None:
    world = World()
    choices(world, 2, cache=CacheControl(write=False))
    world.run()
    assert world.computed("c1")[0] == (0, 40)
    world = World()
    choices(world, 2, cache=CacheControl(read=False))
    world.run()
    assert world.computed("c1")[0] == (0, 40)


def test_an_unfit_first_is_nobodys() -> None:
    world = World()
    world.add("c0", PROMPT, 4)
    world.add("c1", PROMPT[:-1], 4, after="c0")
    world.add("c2", PROMPT, 4, after="nobody")
    world.step()
    assert {who for who, _, _ in world.steps[0]} == {"c0", "c1", "c2"}
    world.run()
    assert world.tokens["c1"] == dense(PROMPT[:-1], 4)
