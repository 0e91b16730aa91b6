"""P11 and P1: for any prompt the server can say, block by block, what is reused and why the rest is computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cache.hashing import encode_tokens
from scheduler.commands import CacheTarget, ChangeCache, Operation, PlanPrompt
from scheduler.messages import BlockReport, CacheControl, CacheReport, GenerationRequest, SamplingParams
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(11).choices(range(3, 160), k=128)
EDITED = [*PROMPT[:39], 1 + PROMPT[39], *PROMPT[40:]]


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


def plan(world: Watched, prompt: list[int], *, reveal: bool = False, **fields: object) -> CacheReport:
    request = GenerationRequest("", tuple(prompt), SamplingParams(max_tokens=1, seed=0), **fields)  # type: ignore[arg-type]
    report = world.engine.command(PlanPrompt(request, reveal))
    assert isinstance(report, CacheReport)
    computed = sum(end - start for start, end in report.computed)
    assert report.prompt_tokens == report.reused + report.copied + report.loaded + report.pending + computed
    assert [block.index for block in report.blocks] == list(range(-(-len(prompt) // 16)))
    return report


def reasons(report: CacheReport) -> list[str | None]:
    return [block.reason for block in report.blocks]


def test_a_plan_is_what_then_happens(world: Watched) -> None:
    rng = random.Random(3)
    for _ in range(30):
        prompt = PROMPT[: rng.randint(0, 100)] + rng.choices(range(3, 160), k=rng.randint(1, 28))
        if rng.random() < 0.5 and len(world.engine.tree):
            world.engine.scheduler.drop(rng.choice(sorted(world.engine.tree, key=lambda node: node.hash)))
        planned = plan(world, prompt)
        name = world.submit(prompt, 1, report=True)
        world.run()
        assert world.outputs[name][0].report == planned


def test_a_plan_touches_nothing(world: Watched) -> None:
    world.complete(PROMPT)
    world.complete(list(reversed(PROMPT)))
    before = list(world.engine.pool._cached), list(world.engine.pool._tails), len(world.engine.tree)
    plan(world, EDITED)
    plan(world, PROMPT)
    assert (list(world.engine.pool._cached), list(world.engine.pool._tails), len(world.engine.tree)) == before


def test_cold(world: Watched) -> None:
    report = plan(world, PROMPT)
    assert reasons(report) == ["never_seen"] * 8
    assert report.computed == ((0, 128),) and report.valid_prefix == 0


def test_warm(world: Watched) -> None:
    world.complete(PROMPT)
    report = plan(world, PROMPT)
    assert reasons(report) == [None] * 7 + ["last_position"]
    assert [block.status for block in report.blocks] == ["reused"] * 7 + ["copied"]
    assert (report.valid_prefix, report.reused, report.copied, report.computed) == (112, 112, 15, ((127, 128),))
    assert report.blocks[2].hash == world.node(PROMPT, 2).hash.hex()


def test_first_different_token(world: Watched) -> None:
    world.complete(PROMPT)
    report = plan(world, EDITED)
    assert reasons(report) == [None, None] + ["different_token"] * 6
    assert report.blocks[2] == BlockReport(
        2,
        32,
        48,
        hash=report.blocks[2].hash,
        status="copied",
        tier="device",
        reason="different_token",
        first_difference=39,
    )
    assert {block.first_difference for block in report.blocks[2:]} == {39}
    assert report.valid_prefix == 32 and report.computed == ((39, 128),)


def test_the_cached_token_is_told_only_to_those_who_may_know(world: Watched) -> None:
    world.complete(PROMPT)
    world.submit(PROMPT, 1, salt="mine")
    world.run()
    assert plan(world, EDITED).blocks[2].cached_token is None
    assert plan(world, EDITED, reveal=True).blocks[2].cached_token == PROMPT[39]
    assert plan(world, EDITED, cache_salt="mine").blocks[2].cached_token == PROMPT[39]


def test_reasons_do_not_cross_a_salt(world: Watched) -> None:
    world.submit(PROMPT, 1, salt="theirs")
    world.run()
    for salt in (None, "mine"):
        report = plan(world, EDITED, cache_salt=salt)
        assert reasons(report) == ["never_seen"] * 8
        assert all(block.first_difference is None for block in report.blocks)


@pytest.mark.parametrize(("operation", "reason"), [(Operation.DROP, "dropped"), (Operation.INVALIDATE, "invalidated")])
def test_dropped_and_invalidated(world: Watched, operation: Operation, reason: str) -> None:
    world.complete(PROMPT)
    world.engine.command(ChangeCache(operation, CacheTarget(prompt=tuple(PROMPT), blocks=(2,))))
    expected = [None, None, reason] + [None if reason == "dropped" else reason] * 5
    if reason == "dropped":
        expected[-1] = "last_position"
    assert reasons(plan(world, PROMPT)) == expected


def test_evicted(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=12))
    world.complete(PROMPT)
    world.complete(random.Random(12).choices(range(3, 160), k=100))
    evicted = [block for block in plan(world, PROMPT).blocks if block.reason == "evicted"]
    assert evicted and evicted[-1].index == 7


def test_after_a_gap_with_truncation(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, recovery="truncate"))
    world.complete(PROMPT)
    world.drop(PROMPT, 2)
    assert reasons(plan(world, PROMPT)) == [None, None, "dropped"] + ["after_gap"] * 5


def test_lineage_unknown(world: Watched) -> None:
    world.complete(PROMPT)
    world.engine.tree.lose_record(world.node(PROMPT, 2))
    assert reasons(plan(world, PROMPT))[3:7] == ["lineage_unknown"] * 4


def test_collision(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, hash_bits=8, num_blocks=400))
    rng = random.Random(1)
    for _ in range(40):
        world.complete(rng.choices(range(3, 160), k=128))
    assert "collision" in {
        reason for _ in range(20) for reason in reasons(plan(world, rng.choices(range(3, 160), k=128)))
    }


def test_computed_by_another_request(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, budget=40))
    world.submit(PROMPT, 1)
    world.step()
    report = plan(world, [*PROMPT, 3])
    assert reasons(report)[2:7] == ["computed_by_another_request"] * 5
    assert report.reused == 32 and report.pending == 80
    world.run()


def test_corrupt(world: Watched) -> None:
    world.complete(PROMPT)
    block = world.node(PROMPT, 2).block
    assert block is not None
    world.engine._storage.layers[0][0][block.block_id, 0, 0] += 1
    world.engine._scrub_rate = 1e9
    world.engine.scrub()
    assert reasons(plan(world, PROMPT))[2] == "corrupt"


def test_opted_out(world: Watched) -> None:
    world.complete(PROMPT)
    assert reasons(plan(world, PROMPT, cache=CacheControl(read=False))) == ["opted_out"] * 8


def test_expired(world: Watched) -> None:
    world.engine._clock = lambda: 100.0
    world.submit(PROMPT, 1, cache=CacheControl(ttl=10.0))
    world.run()
    world.engine._clock = lambda: 111.0
    world.engine.step()
    assert reasons(plan(world, PROMPT)) == ["expired"] * 8


def test_hashes_are_chained_from_the_identity(world: Watched) -> None:
    hashes: list[bytes] = []
    world.engine.tree.extend_hashes(hashes, world.engine.identity.root_hash(), encode_tokens(PROMPT))  # type: ignore[arg-type]
    assert [block.hash for block in plan(world, PROMPT).blocks] == [hash_.hex() for hash_ in hashes]
