"""P8's last promise: an invalidation reaches copies, whatever became of their source and of the copies between."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.lineage import MOST_SOURCES
from scheduler.commands import CacheEffect, CacheTarget, ChangeCache, Operation
from scheduler.messages import CacheControl
from tests.recovery.harness import Ranges, Watched, make_engine

A = random.Random(20).choices(range(3, 150), k=48)
B = [*A[:39], A[39] + 1, *A[40:]]  # copies positions 32..38 of A's block 2
C = [*A[:37], A[37] + 1, *A[38:]]  # copies positions 32..36
APART = [*A[:32], *(token + 5 for token in A[32:])]  # shares block 0 and 1, copies nothing


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


def change(world: Watched, operation: Operation, **target: object) -> int:
    effect = world.engine.command(ChangeCache(operation, CacheTarget(**target)))  # type: ignore[arg-type]
    assert isinstance(effect, CacheEffect)
    world.engine.scheduler.check_integrity()
    return effect.blocks


def drop(world: Watched, prompt: list[int], *blocks: int) -> None:
    assert change(world, Operation.DROP, prompt=tuple(prompt), blocks=blocks) == len(blocks)


def evict(world: Watched, prompt: list[int], block: int) -> None:
    """By pressure, as the scheduler does it: the block is the least recently used one."""
    node = world.node(prompt, block)
    assert node.block is not None
    world.engine.pool._cached.move_to_end(node.block.block_id, last=False)
    while world.engine.pool._free:
        world.engine.pool.allocate()
    taken = [block for block in world.engine.pool.blocks if block.ref_count]
    world.engine.pool.allocate()
    for other in [*taken, *(block for block in world.engine.pool.blocks if block.ref_count and block not in taken)]:
        world.engine.pool.free(other)


def dropped(world: Watched) -> None:
    drop(world, A, 2)


def evicted(world: Watched) -> None:
    evict(world, A, 2)


def republished(world: Watched) -> None:
    drop(world, A, 2)
    assert world.computed(A) == [(39, 48)]  # from what is left of it in B: the copy goes both ways


def stands(world: Watched) -> None:
    pass


def hash_of(world: Watched, prompt: list[int], block: int) -> str:
    hashes: list = []
    from cache.hashing import encode_tokens

    world.engine.tree.extend_hashes(hashes, world.engine.identity.root_hash(), encode_tokens(prompt))
    return hashes[block].hex()


TARGETS: dict[str, Callable[[Watched], dict[str, object]]] = {
    "a block of the prompt": lambda world: {"prompt": tuple(A), "blocks": (2,)},
    "a block of a longer prompt": lambda world: {"prompt": (*A, 7, 8, 9), "blocks": (2,)},
    "a hash": lambda world: {"block_hash": hash_of(world, A, 2)},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fate", [dropped, evicted, republished, stands])
def test_the_source_is_gone(world: Watched, fate: Callable[[Watched], None], target: str) -> None:
    assert world.computed(A) == [(0, 48)]
    assert world.computed(B) == [(39, 48)]
    assert world.computed(APART) == [(32, 48)]
    fate(world)
    assert change(world, Operation.INVALIDATE, **TARGETS[target](world)) >= 1
    assert world.computed(B) == [(32, 48)]
    assert world.computed(APART) == [(47, 48)]


@pytest.mark.parametrize("target", TARGETS)
def test_the_copies_in_between_are_gone_too(world: Watched, target: str) -> None:
    for prompt, start in ((A, 0), (B, 39)):
        assert world.computed(prompt) == [(start, 48)]
    drop(world, A, 2)
    assert world.computed(C) == [(37, 48)]  # from B, which had them from A
    drop(world, B, 2)
    assert change(world, Operation.INVALIDATE, **TARGETS[target](world)) == 1
    assert world.computed(C) == [(32, 48)]


def test_the_copy_is_gone_and_what_was_computed_upon_it_is_not(world: Watched) -> None:
    """Block 3 of the longer B attended to what its block 2 had copied."""
    longer = [*B, *range(20, 40)]
    world.complete(A)
    assert world.computed(longer) == [(39, 68)]
    drop(world, A, 2)
    drop(world, longer, 2)
    assert world.computed(longer) == [(32, 48), (67, 68)]  # the gap is computed anew, and its block 3 is kept
    assert change(world, Operation.INVALIDATE, prompt=tuple(A), blocks=(2,)) == 3
    assert world.computed(longer) == [(32, 68)]


def test_a_running_request_that_copied_is_detached(world: Watched, checkpoint: Path) -> None:
    edited = B[:44]
    expected = Watched(make_engine(checkpoint)).complete(edited, 20)
    world.complete(A)
    name = world.submit(edited, 20)
    world.step()
    world.step()
    drop(world, A, 2)
    change(world, Operation.INVALIDATE, prompt=tuple(A), blocks=(2,))
    published = world.engine.tree.published
    world.run()
    assert world.tokens(name) == expected
    assert world.engine.tree.published == published
    assert world.computed(edited) == [(32, 44)]


@pytest.mark.parametrize("whole", [True, False], ids=["the prompt", "its last block"])
@pytest.mark.parametrize("fate", ["dropped", "superseded", "stands"])
def test_the_source_is_an_unfilled_block(world: Watched, fate: str, whole: bool) -> None:
    short = A[:42]
    assert world.computed(short) == [(0, 42)]
    assert world.computed(B) == [(39, 48)]
    if fate == "dropped":
        drop(world, short, 2)
    elif fate == "superseded":
        assert world.computed(A[:45]) == [(42, 45)]  # a longer tail, which takes the place of the short one
    change(world, Operation.INVALIDATE, prompt=tuple(short), blocks=None if whole else (2,))
    assert world.computed(B) == [(0 if whole else 32, 48)]


def test_a_copy_of_what_another_choice_had_not_finished(world: Watched) -> None:
    """The second choice copies the beginning of the first one's last block, which is published with more in it."""
    first = world.submit(A[:40], 12)
    second = world.submit(A[:40], 12, after=first, temperature=1.0, top_k=5, choice=1)
    world.run()
    whole = [A[:40] + world.tokens(name) for name in (first, second)]
    assert whole[0][:48] != whole[1][:48]
    drop(world, whole[0], 2)
    assert change(world, Operation.INVALIDATE, prompt=tuple(whole[0]), blocks=(2,)) >= 1
    assert world.computed(whole[1]) == [(32, 52)]


def test_what_was_not_copied_stays(world: Watched) -> None:
    """B has the same first tokens, and computed them itself."""
    world.complete(A)
    name = world.submit(B, 1, cache=CacheControl(read=False))
    world.run()
    assert world.tokens(name)
    drop(world, A, 2)
    assert change(world, Operation.INVALIDATE, prompt=tuple(A), blocks=(2,)) == 0
    assert world.computed(B) == [(47, 48)]


def test_memory_is_bounded_and_nothing_escapes(checkpoint: Path) -> None:
    """Each prompt copies from the one before, more often than sources are kept; only the last one is left."""
    world = Watched(make_engine(checkpoint))
    last: list[int] = []
    for count in range(MOST_SOURCES + 10):
        prompt = [*A[:40], 3 + count, *A[41:]]
        expected: Ranges = [(40, 48)] if last else [(0, 48)]
        assert world.computed(prompt) == expected
        if last:
            drop(world, last, 2)
        last = prompt
    (copy,) = [node for node in world.engine.tree if node.index == 2]
    assert len(copy.lineage.sources) == MOST_SOURCES and copy.lineage.cut is not None
    assert change(world, Operation.INVALIDATE, prompt=(*A[:40], 3, *A[41:]), blocks=(2,)) == 1
    assert world.computed(last) == [(32, 48)]


@pytest.mark.parametrize("fate", ["stands", "the copy between is gone", "the copy is gone"])
def test_damage_is_followed_through_copies_that_are_gone(world: Watched, fate: str) -> None:
    """P7: C has its first slots from A, by way of B."""
    engine = world.engine
    engine._scrub_rate = 0.0
    longer = [*C, *range(20, 40)]
    world.complete(A)
    block = world.node(A, 2).block
    assert block is not None
    engine._storage.layers[0][0][block.block_id, 0, 3] += 1.5
    world.complete(B)
    copied = world.node(B, 2).block
    assert copied is not None and copied.lineage
    world.engine.tree.drop(world.node(A, 2))  # so that C copies from B; A comes back, damaged as it was
    world.complete(longer)
    if fate != "stands":
        drop(world, B, 2)
    if fate == "the copy is gone":
        drop(world, longer, 2)
    world.complete(A)
    engine.scheduler.corrupt(_taint_of_first(world), 0.0)
    expected: Ranges = [(32, 68)]
    assert world.computed(longer) == expected


def _taint_of_first(world: Watched):  # type: ignore[no-untyped-def]
    """As if A's block had been there all the time and was last found good before anything was copied."""
    found = world.node(A, 2).block
    assert found is not None
    found.checked_at = 0
    return world.engine._integrity.taint(found)
