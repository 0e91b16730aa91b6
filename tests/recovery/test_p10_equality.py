"""P10: reuse never changes an answer. Every way to a token's logits gives the same bits, and transformers' values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.model.cpu import native
from tests.model.tiny import ARCHITECTURES, WIDE, save_tiny
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(10).choices(range(3, 160), k=150)
NEW = 12
BUDGETS = [1, 7, 16, 33]


class Reference:
    """One checkpoint, transformers' logits for each new token, and our cold ones."""

    def __init__(self, architecture: str, path: Path) -> None:
        self.path = path
        self.small_block = 16 if architecture in WIDE else 8
        model = save_tiny(architecture, path)
        cold = Watched(make_engine(path, max_model_len=512))
        assert cold.engine.info.backend == ("c" if architecture in WIDE else "torch")
        self.tokens = cold.complete(PROMPT, NEW)
        self.cold = torch.cat(cold.logits)
        with torch.inference_mode():
            dense = model(torch.tensor([PROMPT + self.tokens])).logits[0]
        self.dense = dense[len(PROMPT) - 1 : -1]


@pytest.fixture(scope="module", params=ARCHITECTURES + WIDE)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """By the torch network, and by the C backend, which computes the wide ones."""
    if request.param in WIDE:
        native("f32")  # skips where it is not built
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def sampled_logits(world: Watched) -> torch.Tensor:
    return torch.cat([logits for logits in world.logits if logits.shape[0]])


def check(world: Watched, tokens: Sequence[int], reference: Reference) -> None:
    assert tokens == reference.tokens
    assert torch.equal(sampled_logits(world), reference.cold)


def test_cold_equals_transformers(reference: Reference) -> None:
    assert torch.allclose(reference.cold, reference.dense, rtol=0, atol=1e-4)
    assert reference.cold.argmax(-1).tolist() == reference.tokens


def test_warm(reference: Reference) -> None:
    world = Watched(make_engine(reference.path))
    world.complete(PROMPT, NEW)
    check(world, world.complete(PROMPT, NEW), reference)
    assert world.steps[0] == [149]


@pytest.mark.parametrize("budget", BUDGETS)
def test_chunked(reference: Reference, budget: int) -> None:
    world = Watched(make_engine(reference.path, budget=budget))
    check(world, world.complete(PROMPT, NEW), reference)
    assert max(len(step) for step in world.steps) == budget


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [7, 512])
def test_random_gaps(reference: Reference, seed: int, budget: int) -> None:
    rng = random.Random(seed)
    size = reference.small_block
    world = Watched(make_engine(reference.path, block_size=size, budget=budget))
    world.complete(PROMPT, NEW)
    dropped = sorted(rng.sample(range(144 // size), rng.randint(1, 9)))
    world.drop(PROMPT, *dropped)
    check(world, world.complete(PROMPT, NEW), reference)
    gaps = [position for index in dropped for position in range(index * size, (index + 1) * size)]
    prefill = [position for step in world.steps for position in step if position < len(PROMPT)]
    assert prefill == [*gaps, 149]


def test_preempted(reference: Reference) -> None:
    """Two requests in a pool that cannot hold both to their ends: the newer is preempted, resumed, and the same."""
    other = random.Random(11).choices(range(3, 160), k=100)
    world = Watched(make_engine(reference.path, num_blocks=17, max_model_len=200))
    older = world.submit(other, 40)
    newer = world.submit(PROMPT, NEW)
    world.run()
    assert world.engine.stats().preemptions > 0
    assert world.tokens(newer) == reference.tokens
    alone = Watched(make_engine(reference.path))
    assert world.tokens(older) == alone.complete(other, 40)


def test_in_company(reference: Reference) -> None:
    """Beside others, arriving at other times, in another order: the same tokens."""
    rng = random.Random(5)
    world = Watched(make_engine(reference.path, budget=40, num_blocks=100))
    names = [world.submit(PROMPT[: rng.randint(1, 140)] + rng.choices(range(3, 160), k=9), 20) for _ in range(3)]
    world.step()
    mine = world.submit(PROMPT, NEW, priority=-1)
    names += [world.submit(rng.choices(range(3, 160), k=rng.randint(1, 60)), 20) for _ in range(3)]
    world.run()
    assert world.tokens(mine) == reference.tokens
    assert all(len(world.tokens(name)) == 20 for name in names)
