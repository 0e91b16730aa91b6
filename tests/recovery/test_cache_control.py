"""What one request may do with the cache: salt, read, write, time to live, pin."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from scheduler.messages import CacheControl, PrefixPin
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(13).choices(range(3, 160), k=128)


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


def send(world: Watched, prompt: list[int] = PROMPT, *, salt: str | None = None, **cache: object) -> list[int]:
    """The positions that one request computes."""
    world.steps.clear()
    world.submit(prompt, 1, salt=salt, cache=CacheControl(**cache))  # type: ignore[arg-type]
    world.run()
    return [position for step in world.steps for position in step]


def test_another_salt_shares_nothing(world: Watched) -> None:
    assert send(world) == list(range(128))
    assert send(world, salt="a") == list(range(128))
    assert send(world, salt="b") == list(range(128))
    assert send(world, salt="a") == [127]
    assert send(world) == [127]


def test_read_off_computes_all_and_gives_the_cold_values(world: Watched) -> None:
    send(world)
    cold = world.logits[-1]
    assert send(world, read=False) == list(range(128))
    assert torch.equal(world.logits[-1], cold)
    assert send(world) == [127]


def test_write_off_leaves_nothing(world: Watched) -> None:
    assert send(world, write=False) == list(range(128))
    assert world.engine.pool.cached == 0 and len(world.engine.tree) == 0
    send(world)
    cached = world.engine.pool.cached
    longer = [*PROMPT, *PROMPT[:40]]
    assert send(world, longer, write=False) == list(range(128, 168))
    assert world.engine.pool.cached == cached
    world.drop(PROMPT, 2)
    assert send(world, longer, write=False) == [*range(32, 48), *range(128, 168)]
    assert world.engine.pool.cached == cached - 1


def at(world: Watched, time: float) -> None:
    world.engine._clock = lambda: time
    world.engine.step()


def test_a_time_to_live_counts_from_the_last_use(world: Watched) -> None:
    at(world, 0.0)
    send(world, ttl=10.0)
    at(world, 8.0)
    assert send(world, ttl=10.0) == [127]
    at(world, 17.0)
    assert send(world, ttl=10.0) == [127]
    at(world, 28.0)
    assert world.engine.pool.cached == 0
    assert send(world, ttl=10.0) == list(range(128))


def test_the_longest_time_to_live_wins(world: Watched) -> None:
    at(world, 0.0)
    send(world, ttl=10.0)
    send(world, ttl=100.0)
    send(world, ttl=5.0)
    at(world, 90.0)
    assert send(world, ttl=1.0) == [127]
    send(world)  # asks for none: the blocks stay until they are evicted
    at(world, 10_000.0)
    assert send(world, PROMPT[:100]) == [99]


def test_a_block_in_use_does_not_expire(world: Watched) -> None:
    at(world, 0.0)
    world.submit(PROMPT, 30, cache=CacheControl(ttl=5.0))
    for time in range(1, 30):
        at(world, float(time))
        assert all(len(step) == 1 for step in world.steps[1:])
    world.run()


def test_pinned_blocks_outlive_others(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=40))
    send(world, PROMPT, pin=True)
    assert world.engine.stats().pinned_blocks == 8
    for seed in range(10):
        send(world, random.Random(seed).choices(range(3, 160), k=300))
    assert world.engine.stats().evicted_blocks > 100
    assert send(world) == [127]


def test_pins_are_bounded(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=20))
    send(world, PROMPT, pin=True)
    assert world.engine.stats().pinned_blocks == 5


def test_pins_give_way_rather_than_block_the_server(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=20))
    send(world, PROMPT, pin=True)
    expected = Watched(make_engine(checkpoint)).complete(PROMPT[::-1] * 2 + PROMPT[:40], 24)
    assert world.complete(PROMPT[::-1] * 2 + PROMPT[:40], 24) == expected
    assert world.engine.stats().pinned_blocks == 0


def test_a_pin_of_a_prefix_is_of_the_blocks_that_hold_it_and_ends(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=40))
    at(world, 0.0)
    send(world, PROMPT, prefix_pins=(PrefixPin(16, 3600.0), PrefixPin(40, 300.0)))
    pinned = [world.node(PROMPT, index).block.pinned for index in range(8)]  # type: ignore[union-attr]
    assert pinned == [True, True, True, False, False, False, False, False]
    at(world, 299.0)
    assert world.engine.stats().pinned_blocks == 3
    send(world, PROMPT, prefix_pins=(PrefixPin(20, 300.0),))
    at(world, 300.0)
    assert world.engine.stats().pinned_blocks == 2
    for seed in range(10):
        send(world, random.Random(seed).choices(range(3, 160), k=300))
    assert send(world) == list(range(32, 128))
    at(world, 3600.0)
    assert world.engine.stats().pinned_blocks == 0
    assert world.engine.pool.cached > 30
