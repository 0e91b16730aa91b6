"""P8 and P9: drop and invalidate are two operations, act between steps, and requests in flight survive both."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from scheduler.commands import CacheEffect, CacheTarget, ChangeCache, CommandRefused, Operation
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(8).choices(range(3, 160), k=130)
OTHER = [*PROMPT[:64], *random.Random(9).choices(range(3, 160), k=40)]


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


def change(world: Watched, operation: Operation, **target: object) -> CacheEffect:
    effect = world.engine.command(ChangeCache(operation, CacheTarget(**target)))  # type: ignore[arg-type]
    assert isinstance(effect, CacheEffect)
    world.engine.scheduler.check_integrity()
    assert effect.bytes == effect.blocks * world.engine.info.block_bytes
    assert effect.by_tier == {"device": effect.blocks}
    return effect


def test_drop_a_prompt(world: Watched) -> None:
    world.complete(PROMPT)
    assert change(world, Operation.DROP, prompt=tuple(PROMPT)).blocks == 9  # eight full blocks and the tail
    assert world.computed(PROMPT) == [(0, 130)]


def test_drop_named_blocks_keeps_the_rest_and_the_descendants(world: Watched) -> None:
    world.complete(PROMPT)
    assert change(world, Operation.DROP, prompt=tuple(PROMPT), blocks=(1, 5)).blocks == 2
    assert world.computed(PROMPT) == [(16, 32), (80, 96), (129, 130)]


def test_drop_the_tail_by_its_index(world: Watched) -> None:
    world.complete(PROMPT)
    assert change(world, Operation.DROP, prompt=tuple(PROMPT), blocks=(8,)).blocks == 1
    assert world.computed(PROMPT) == [(128, 130)]


def test_invalidate_a_prompt_from_its_first_named_block(world: Watched) -> None:
    world.complete(PROMPT)
    world.complete(OTHER)
    assert change(world, Operation.INVALIDATE, prompt=tuple(PROMPT), blocks=(5, 2)).blocks == 7 + 3
    assert world.computed(PROMPT) == [(32, 130)]
    assert world.computed(OTHER) == [(64, 104)]  # its first four blocks were computed again, with the prompt above


def test_invalidate_a_prompt_from_its_first_block(world: Watched) -> None:
    world.complete(PROMPT)
    assert change(world, Operation.INVALIDATE, prompt=tuple(PROMPT)).blocks == 9
    assert len(world.engine.tree) == 0
    assert world.computed(PROMPT) == [(0, 130)]


def test_what_was_copied_from_an_invalidated_block_goes_with_it(world: Watched) -> None:
    """Slots 0..6 of block 2 live on in an edited prompt's block, and 0..3 of that one in another's."""
    edited = [*PROMPT[:39], 1 + PROMPT[39], *PROMPT[40:]]
    again = [*PROMPT[:36], 1 + PROMPT[36], *PROMPT[37:]]
    apart = [*PROMPT[:16], *reversed(PROMPT[16:])]
    for prompt, start in ((PROMPT, 0), (edited, 39), (again, 36), (apart, 16)):
        assert world.computed(prompt) == [(start, 130)]
    assert change(world, Operation.INVALIDATE, prompt=tuple(PROMPT), blocks=(2,)).blocks == 3 * 7
    for prompt, start in ((edited, 32), (again, 36), (PROMPT, 39), (apart, 129)):
        assert world.computed(prompt) == [(start, 130)]


def test_a_request_that_holds_a_copy_of_an_invalidated_block_is_detached(world: Watched, checkpoint: Path) -> None:
    edited = [
        *PROMPT[:39],
        1 + PROMPT[39],
        *PROMPT[40:44],
    ]  # its copied block does not fill before it has said 4 tokens
    expected = Watched(make_engine(checkpoint)).complete(edited, 20)
    world.complete(PROMPT)
    name = world.submit(edited, 20)
    for _ in range(2):
        world.step()
    change(world, Operation.INVALIDATE, prompt=tuple(PROMPT), blocks=(2,))
    published = world.engine.tree.published
    world.run()
    assert world.tokens(name) == expected
    assert world.engine.tree.published == published
    assert world.computed(edited) == [(32, 44)]


@pytest.mark.parametrize("operation", Operation)
def test_by_block_hash(world: Watched, operation: Operation) -> None:
    world.complete(PROMPT)
    hash_ = world.node(PROMPT, 2).hash.hex()
    lost = change(world, operation, block_hash=hash_).blocks
    if operation is Operation.DROP:
        assert lost == 1 and world.computed(PROMPT) == [(32, 48), (129, 130)]
    else:
        assert lost == 7 and world.computed(PROMPT) == [(32, 130)]
    assert change(world, operation, block_hash="00" * 16).blocks == 0


@pytest.mark.parametrize("operation", Operation)
def test_everything(world: Watched, operation: Operation) -> None:
    world.complete(PROMPT)
    world.complete(list(reversed(PROMPT)))
    assert change(world, operation, everything=True).blocks == 18
    assert world.engine.pool.cached == 0
    assert world.computed(PROMPT) == [(0, 130)]


@pytest.mark.parametrize("operation", Operation)
def test_by_salt_and_a_prompt_with_its_salt(world: Watched, operation: Operation) -> None:
    for salt in (None, "x", "y"):
        world.submit(PROMPT, 1, salt=salt)
        world.run()
    assert change(world, operation, prompt=tuple(PROMPT), cache_salt="z").blocks == 0
    assert change(world, operation, cache_salt="x").blocks == 9
    assert change(world, operation, prompt=tuple(PROMPT), cache_salt="y").blocks == 9
    assert world.computed(PROMPT) == [(129, 130)]  # that without a salt was not touched


@pytest.mark.parametrize(
    ("target", "param"),
    [
        ({"block_hash": "not a hash"}, "block_hash"),
        ({"prompt": tuple(PROMPT), "blocks": (0, 9)}, "blocks[1]"),
        ({"prompt": tuple(PROMPT), "blocks": (-1,)}, "blocks[0]"),
    ],
)
def test_a_target_that_makes_no_sense_changes_nothing(world: Watched, target: dict[str, object], param: str) -> None:
    world.complete(PROMPT)
    with pytest.raises(CommandRefused) as refused:
        change(world, Operation.DROP, **target)
    assert refused.value.param == param
    assert world.computed(PROMPT) == [(129, 130)]


@pytest.mark.parametrize("seed", range(5))
def test_sharers_of_a_dropped_block_end_as_undisturbed(checkpoint: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [PROMPT[:96] + rng.choices(range(3, 160), k=rng.randint(1, 20)) for _ in range(8)]
    calm, disturbed = (Watched(make_engine(checkpoint, budget=64, num_blocks=160)) for _ in range(2))
    drop_at = rng.randint(1, 14)
    for world in (calm, disturbed):
        names = [world.submit(prompt, 12) for prompt in prompts]
        for step in range(16):
            if world is disturbed and step == drop_at:
                blocks = tuple(rng.sample(range(6), 2))
                change(world, Operation.DROP, prompt=tuple(PROMPT[:96]), blocks=blocks)
            world.step()
        world.run()
        if world is calm:
            expected = [world.tokens(name) for name in names]
    assert [disturbed.tokens(name) for name in names] == expected


def test_a_request_that_holds_an_invalidated_block_ends_on_its_version(world: Watched, checkpoint: Path) -> None:
    expected = Watched(make_engine(checkpoint)).complete(PROMPT, 40)
    name = world.submit(PROMPT, 40)
    for _ in range(10):
        world.step()
    change(world, Operation.INVALIDATE, prompt=tuple(PROMPT), blocks=(2,))
    published = world.engine.tree.published
    steps = len(world.steps)
    world.run()
    assert world.tokens(name) == expected
    assert all(len(step) == 1 for step in world.steps[steps:]), "a detached request keeps its blocks"
    assert world.engine.tree.published == published, "a detached request publishes nothing more"
    assert world.computed(PROMPT) == [(32, 130)]


def test_a_detached_request_that_is_preempted_computes_all_of_it_again(world: Watched, checkpoint: Path) -> None:
    expected = Watched(make_engine(checkpoint)).complete(PROMPT, 20)
    name = world.submit(PROMPT, 20)
    for _ in range(5):
        world.step()
    change(world, Operation.INVALIDATE, prompt=tuple(PROMPT), blocks=(2,))
    world.engine.scheduler._preempt(world.engine.scheduler.running[0], 0.0)
    world.engine.scheduler.check_integrity()
    world.step()
    assert world.steps[-1] == list(range(135))
    world.run()
    assert world.tokens(name) == expected
    assert world.computed(PROMPT) == [(32, 130)]


def test_a_stale_block_does_not_come_back_under_a_recomputed_parent(world: Watched) -> None:
    """The old holder's blocks and the new ones of equal tokens live side by side; only the new ones are found."""
    world.submit(PROMPT, 30)
    for _ in range(3):
        world.step()
    change(world, Operation.INVALIDATE, everything=True)
    world.submit(PROMPT, 3)
    world.step()
    assert world.steps[-1] == [132, *range(130)]
    old, new = world.engine.scheduler.running
    assert all(block is not None and block.node is None for block in old.table)
    assert not {id(block) for block in old.table} & {id(block) for block in new.table}
    world.run()


def test_a_warm_answer_after_a_drop_is_the_cold_one(world: Watched) -> None:
    world.complete(PROMPT)
    cold = world.logits[-1]
    change(world, Operation.DROP, prompt=tuple(PROMPT), blocks=(3,))
    world.complete(PROMPT)
    assert torch.equal(world.logits[-1], cold)
