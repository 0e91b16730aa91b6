"""P10 in bfloat16 and float16 on CPU: the same bits whatever the way to them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(10).choices(range(3, 160), k=150)
NEW = 8


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, backend: str) -> str:
    if backend == "c" and request.param == "float16":
        pytest.skip("the C backend has no float16")
    return str(request.param)


@pytest.fixture(scope="module")
def cold(checkpoint: Path, dtype: str) -> torch.Tensor:
    world = Watched(make_engine(checkpoint, dtype=dtype))
    world.complete(PROMPT, NEW)
    return torch.cat(world.logits)


def logits_of(world: Watched, prompt: list[int] = PROMPT) -> torch.Tensor:
    world.complete(prompt, NEW)
    return torch.cat([logits for logits in world.logits if logits.shape[0]])


def test_warm_and_with_gaps(checkpoint: Path, dtype: str, cold: torch.Tensor) -> None:
    world = Watched(make_engine(checkpoint, dtype=dtype))
    world.complete(PROMPT, NEW)
    assert torch.equal(logits_of(world), cold)
    assert world.steps[0] == [149]
    world.drop(PROMPT, 1, 2, 6)
    assert torch.equal(logits_of(world), cold)
    assert world.steps[0] == [*range(16, 48), *range(96, 112), 149]


@pytest.mark.parametrize("budget", [1, 7, 33])
def test_chunked(checkpoint: Path, dtype: str, cold: torch.Tensor, budget: int) -> None:
    assert torch.equal(logits_of(Watched(make_engine(checkpoint, dtype=dtype, budget=budget))), cold)


def test_two_threads(checkpoint: Path, dtype: str, cold: torch.Tensor) -> None:
    assert torch.equal(logits_of(Watched(make_engine(checkpoint, dtype=dtype, threads=2))), cold)


def test_in_company_and_preempted(checkpoint: Path, dtype: str, cold: torch.Tensor) -> None:
    """The tokens are those of the cold run, beside others, with preemptions on the way."""
    rng = random.Random(2)
    world = Watched(make_engine(checkpoint, dtype=dtype, budget=400, num_blocks=23, max_model_len=200))
    names = [world.submit(rng.choices(range(3, 160), k=90), 60) for _ in range(2)]
    mine = world.submit(PROMPT, NEW, priority=1)
    world.run()
    assert world.engine.stats().preemptions > 0
    assert world.tokens(mine) == cold.argmax(-1).tolist()
    assert all(len(world.tokens(name)) == 60 for name in names)
