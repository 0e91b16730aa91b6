"""The table of exact positions: which K/V are computed when some are missing. B = 16, a prompt of 128 tokens, no other
prompt cached; "40th token" is position 39. Asserted at the network's input, with a right answer at its output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.recovery.harness import Ranges, Watched, make_engine

PROMPT = random.Random(40).choices(range(3, 160), k=190)
N = 128


@pytest.fixture(params=["repair", "truncate"])
def recovery(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["partial reuse", "whole blocks"])
def partial(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def build(checkpoint: Path, partial: bool):  # type: ignore[no-untyped-def]
    def make(recovery: str = "repair", budget: int = 512) -> Watched:
        return Watched(make_engine(checkpoint, recovery=recovery, partial_reuse=partial, budget=budget))

    return make


def cold_logits(checkpoint: Path, prompt: Sequence[int]) -> torch.Tensor:
    """The last position's logits with nothing cached."""
    world = Watched(make_engine(checkpoint))
    world.complete(prompt)
    return world.logits[-1]


def check(world: Watched, checkpoint: Path, prompt: Sequence[int], expected: Ranges) -> None:
    """Exactly these positions are computed, and the answer is the cold one to the last bit."""
    assert world.computed(prompt) == expected
    assert torch.equal(world.logits[-1], cold_logits(checkpoint, prompt))


def test_cold(build, recovery: str) -> None:  # type: ignore[no-untyped-def]
    assert build(recovery).computed(PROMPT[:N]) == [(0, 128)]


def test_fully_warm(build, checkpoint: Path, partial: bool, recovery: str) -> None:  # type: ignore[no-untyped-def]
    world = build(recovery)
    world.complete(PROMPT[:N])
    check(world, checkpoint, PROMPT[:N], [(127, 128)] if partial else [(112, 128)])


def test_40th_token_edited(build, checkpoint: Path, partial: bool, recovery: str) -> None:  # type: ignore[no-untyped-def]
    world = build(recovery)
    world.complete(PROMPT[:N])
    edited = [*PROMPT[:39], 1 + PROMPT[39], *PROMPT[40:N]]
    check(world, checkpoint, edited, [(39, 128)] if partial else [(32, 128)])


LOST = {
    "the block with the 40th token": ([2], [(32, 48)]),
    "two gaps": ([1, 5], [(16, 32), (80, 96)]),
    "an earlier gap too": ([0, 2], [(0, 16), (32, 48)]),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_blocks(build, checkpoint: Path, partial: bool, case: str) -> None:  # type: ignore[no-untyped-def]
    world = build()
    world.complete(PROMPT[:N])
    dropped, gaps = LOST[case]
    world.drop(PROMPT[:N], *dropped)
    check(world, checkpoint, PROMPT[:N], gaps + ([(127, 128)] if partial else [(112, 128)]))


def test_lost_block_with_truncation(build, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    world = build("truncate")
    world.complete(PROMPT[:N])
    world.drop(PROMPT[:N], 2)
    check(world, checkpoint, PROMPT[:N], [(32, 128)])


def test_invalidated_at_block_2(build, checkpoint: Path, recovery: str) -> None:  # type: ignore[no-untyped-def]
    world = build(recovery)
    world.complete(PROMPT[:N])
    world.engine.scheduler.invalidate(world.node(PROMPT[:N], 2))
    check(world, checkpoint, PROMPT[:N], [(32, 128)])


@pytest.mark.parametrize("d", [0, 5, 15])
def test_same_tokens_after_another_prefix(build, checkpoint: Path, partial: bool, d: int) -> None:  # type: ignore[no-untyped-def]
    world = build()
    world.complete(PROMPT[:N])
    other = [*PROMPT[:d], 1 + PROMPT[d], *PROMPT[d + 1 : N]]
    check(world, checkpoint, other, [(d if partial else 0, 128)])


def test_gap_of_unknown_lineage(build, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    world = build()
    world.complete(PROMPT[:N])
    world.engine.tree.lose_record(world.node(PROMPT[:N], 2))
    check(world, checkpoint, PROMPT[:N], [(32, 128)])


@pytest.mark.parametrize("partial", [True], ids=["partial reuse"], indirect=True)
def test_budget_of_32_with_two_gaps(build) -> None:  # type: ignore[no-untyped-def]
    world = build(budget=32)
    world.complete(PROMPT[:N])
    world.drop(PROMPT[:N], 1, 5)
    world.complete(PROMPT[:N])
    assert world.steps == [[*range(16, 32), *range(80, 96)], [127]]


def test_dropped_while_decoding(build) -> None:  # type: ignore[no-untyped-def]
    calm, disturbed = build(), build()
    expected = calm.complete(PROMPT[:N], 40)
    name = disturbed.submit(PROMPT[:N], 40)
    for _ in range(20):
        disturbed.step()
    disturbed.drop(PROMPT[:N], 2)
    disturbed.step()
    assert disturbed.steps[-1] == [*range(32, 48), 147]
    disturbed.run()
    assert disturbed.tokens(name) == expected
    assert all(torch.equal(a, b) for a, b in zip(calm.logits, disturbed.logits, strict=True))


def test_prompt_of_exactly_two_blocks(build, checkpoint: Path, partial: bool) -> None:  # type: ignore[no-untyped-def]
    world = build()
    world.complete(PROMPT[:32])
    check(world, checkpoint, PROMPT[:32], [(31, 32)] if partial else [(16, 32)])


def test_ten_tokens_sent_twice(build, checkpoint: Path, partial: bool) -> None:  # type: ignore[no-untyped-def]
    world = build()
    world.complete(PROMPT[:10])
    check(world, checkpoint, PROMPT[:10], [(9, 10)] if partial else [(0, 10)])


def test_next_chat_turn(build, checkpoint: Path, partial: bool) -> None:  # type: ignore[no-untyped-def]
    world = build()
    said = world.complete(PROMPT[:130], 20)
    turn = PROMPT[:130] + said + PROMPT[150:190]
    check(world, checkpoint, turn, [(149, 190)] if partial else [(144, 190)])
