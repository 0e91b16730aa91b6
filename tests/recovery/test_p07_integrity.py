"""P6 and P7: a hit is verified, not believed; corruption is loss, and a taint that is followed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cache.block import Block
from scheduler.messages import FinishReason
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(7).choices(range(3, 160), k=128)


def damage(world: Watched, block: Block | None) -> None:
    """Flip bits of a block's bytes, in the first layer's keys."""
    assert block is not None
    plane = world.engine._storage.layers[0][0]
    plane[block.block_id, 0, 3] = 7.5 - plane[block.block_id, 0, 3]


def scrub_all(world: Watched) -> None:
    """What the scrubber finds in one round over the whole pool."""
    engine = world.engine
    engine._scrub_rate = 1e9
    for output in engine.scrub():
        world.outputs[output.request_id].append(output)
    engine._scrub_rate = 0.0
    engine.scheduler.check_integrity()


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    world = Watched(make_engine(checkpoint))
    world.engine._scrub_rate = 0.0
    return world


def test_sound_blocks_pass(world: Watched) -> None:
    world.complete(PROMPT)
    scrub_all(world)
    stats = world.engine.stats()
    assert stats.checked_blocks >= 8 and stats.corrupt_blocks == 0
    assert world.computed(PROMPT) == [(127, 128)]


def test_a_corrupt_block_is_lost_counted_and_repaired(world: Watched, checkpoint: Path) -> None:
    world.complete(PROMPT)
    right = world.logits[-1]
    damage(world, world.node(PROMPT, 2).block)
    scrub_all(world)
    assert world.engine.stats().corrupt_blocks == 1
    # Everything below was published in the same step as the block was found good, so none of it is tainted.
    assert world.computed(PROMPT) == [(32, 48), (127, 128)]
    assert torch.equal(world.logits[-1], right)


def test_what_was_computed_on_the_damage_goes_with_it(world: Watched) -> None:
    world.complete(PROMPT[:64])
    damage(world, world.node(PROMPT, 1).block)
    world.complete(PROMPT)  # reads the damaged block, publishes 4..7 below it
    wrong = world.logits[-1]
    scrub_all(world)
    assert world.computed(PROMPT) == [(16, 32), (64, 128)]
    assert not torch.equal(world.logits[-1], wrong)


def test_copies_made_of_the_damage_go_with_it(world: Watched) -> None:
    world.complete(PROMPT[:64])
    damage(world, world.node(PROMPT, 1).block)
    edited = [*PROMPT[:28], 1 + PROMPT[28], *PROMPT[29:96]]
    world.complete(edited)  # copies 12 slots of the damaged block
    scrub_all(world)
    assert world.computed(edited) == [(16, 96)]


def test_a_running_request_that_sent_nothing_starts_again_from_what_is_trusted(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, budget=40))
    world.engine._scrub_rate = 0.0
    cold = Watched(make_engine(checkpoint)).complete(PROMPT, 5)
    world.complete(PROMPT[:64])
    damage(world, world.node(PROMPT, 1).block)
    name = world.submit(PROMPT, 5)
    world.step()
    assert world.engine.scheduler.running and not world.outputs[name]
    scrub_all(world)
    world.run()
    assert world.tokens(name) == cold


def test_a_running_request_that_has_sent_something_fails_clearly(world: Watched) -> None:
    world.complete(PROMPT[:64])
    damage(world, world.node(PROMPT, 1).block)
    name = world.submit(PROMPT, 20)
    for _ in range(3):
        world.step()
    scrub_all(world)
    assert world.outputs[name][-1].finish_reason is FinishReason.ERROR
    assert "corrupt" in (world.outputs[name][-1].error or "")
    assert not world.engine.has_work


def test_a_running_request_that_never_read_it_is_left_alone(world: Watched) -> None:
    world.complete(PROMPT[:64])
    other = world.submit(list(reversed(PROMPT)), 20)
    for _ in range(3):
        world.step()
    damage(world, world.node(PROMPT, 1).block)
    scrub_all(world)
    world.run()
    assert len(world.tokens(other)) == 20


@pytest.mark.parametrize("seed", range(3))
def test_colliding_hashes_are_misses_never_wrong_kv(checkpoint: Path, seed: int) -> None:
    """With hashes of 8 bits, hundreds of blocks collide all the time."""
    rng = random.Random(seed)
    colliding = Watched(make_engine(checkpoint, hash_bits=8))
    sound = Watched(make_engine(checkpoint))
    for _ in range(25):
        prompt = PROMPT[: rng.randint(0, 90)] + rng.choices(range(3, 160), k=rng.randint(1, 90))
        assert colliding.complete(prompt) == sound.complete(prompt)
        assert torch.equal(colliding.logits[-1], sound.logits[-1])
    assert colliding.engine.stats().hash_collisions > 0


@pytest.mark.parametrize("length", [64, 70], ids=["full blocks", "a tail"])
def test_nan_that_was_published_unseen_does_not_fail_a_prompt_for_ever(checkpoint: Path, length: int) -> None:
    """A request that is aborted before it samples leaves its K/V to others, whatever is in them."""
    expected = Watched(make_engine(checkpoint)).complete(PROMPT, 3)
    world = Watched(make_engine(checkpoint, budget=length))
    world.submit(PROMPT, 3)
    world.step()
    block = world.engine.scheduler.running[0].table[(length - 1) // 16]
    assert block is not None
    world.engine._storage.layers[1][0][block.block_id, 0, 2] = torch.nan
    world.engine.abort("request 1")
    failed = world.submit(PROMPT, 3)
    world.run()
    assert world.outputs[failed][-1].finish_reason is FinishReason.ERROR
    assert world.complete(PROMPT, 3) == expected
