"""Log-probabilities of prompt tokens: no cache is read for them, and the values are the cold ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from scheduler.messages import GenerationRequest, RequestOutput, SamplingParams
from tests.model.tiny import build_tiny
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(14).choices(range(3, 160), k=300)


def score(world: Watched, prompt: list[int], count: int = 2) -> RequestOutput:
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=count)
    assert world.engine.add(GenerationRequest("scored", tuple(prompt), params)) is None
    world.outputs["scored"] = []
    world.run()
    return world.outputs["scored"][0]


@pytest.fixture(scope="module")
def dense(architecture: str) -> torch.Tensor:
    """transformers' log-probabilities of every next token of the prompt."""
    with torch.inference_mode():
        return build_tiny(architecture)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("budget", [512, 7])
def test_equal_to_transformers_cold_and_warm(checkpoint: Path, dense: torch.Tensor, budget: int) -> None:
    world = Watched(make_engine(checkpoint, budget=budget))
    cold = score(world, PROMPT)
    assert len(cold.prompt_logprobs) == len(PROMPT) and cold.prompt_logprobs[0] is None
    for index, found in enumerate(cold.prompt_logprobs[1:], start=1):
        assert found is not None and found.token_id == PROMPT[index]
        assert abs(found.logprob - dense[index - 1, PROMPT[index]].item()) < 1e-4
        values, tokens = dense[index - 1].topk(2)
        assert [token for token, _ in found.top] == tokens.tolist()
        assert found.rank == 1 + int((dense[index - 1] > dense[index - 1, PROMPT[index]]).sum())
    warm = score(world, PROMPT)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.usage is not None and warm.usage.cached_tokens == 0


def test_no_step_has_more_rows_than_is_bearable(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint))
    score(world, PROMPT)
    assert [len(step) for step in world.steps] == [256, 44]


def test_others_reuse_what_it_computed_but_never_write_for_it(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, budget=40))
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
    world.engine.add(GenerationRequest("scored", tuple(PROMPT[:100]), params, priority=1))
    world.outputs["scored"] = []
    world.step()
    other = world.submit([*PROMPT[:96], 5], 2, priority=0)
    world.run()
    assert len(world.outputs["scored"][0].prompt_logprobs) == 100
    assert len(world.tokens(other)) == 2
    assert world.computed(PROMPT[:100]) == [(99, 100)]


def test_preempted_half_way(checkpoint: Path) -> None:
    whole = score(Watched(make_engine(checkpoint)), PROMPT[:100]).prompt_logprobs
    world = Watched(make_engine(checkpoint, budget=40))
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=2)
    world.engine.add(GenerationRequest("scored", tuple(PROMPT[:100]), params))
    world.outputs["scored"] = []
    world.step()
    world.engine.scheduler._preempt(world.engine.scheduler.running[0], 0.0)
    world.run()
    assert world.outputs["scored"][0].prompt_logprobs == whole
