"""Several choices of one prompt on a real network: the prompt is computed once, and nobody's tokens change for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.harness import Watched, make_engine

PROMPT = [(7 * position) % 150 for position in range(40)]
LENGTHS = [1, 16, 33, 40]


def sampled(engine: Watched, length: int, count: int, **params: object) -> list[list[int]]:
    """The tokens of `count` choices of one prompt, asked for together."""
    first = engine.submit(PROMPT[:length], 12, choice=0, **params)
    names = [first, *(engine.submit(PROMPT[:length], 12, choice=k, after=first, **params) for k in range(1, count))]
    engine.run()
    return [engine.tokens(name) for name in names]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_once(length: int, checkpoint: Path) -> None:
    engine = Watched(make_engine(checkpoint))
    sampled(engine, length, 4, temperature=1.0)
    assert engine.steps[0] == list(range(length))
    assert engine.steps[1] == [length, length - 1, length - 1, length - 1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("partial_reuse", [True, False])
def test_each_choice_is_what_it_would_be_alone(length: int, partial_reuse: bool, checkpoint: Path) -> None:
    together = sampled(
        Watched(make_engine(checkpoint, partial_reuse=partial_reuse)), length, 4, temperature=1.0, seed=5
    )
    engine, alone = Watched(make_engine(checkpoint)), []
    for choice in range(4):
        params = {"temperature": 1.0, "seed": 5, "choice": choice}
        name = engine.submit(PROMPT[:length], 12, salt=str(choice), **params)  # nothing of another one is cached
        engine.run()
        alone.append(engine.tokens(name))
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 4, "the choices have noise of their own"


def test_greedy_choices_are_equal(checkpoint: Path) -> None:
    texts = sampled(Watched(make_engine(checkpoint)), 40, 3)
    assert texts[0] == texts[1] == texts[2]


def test_more_choices_than_blocks_to_run_them_at_once(checkpoint: Path) -> None:
    """Some are preempted, some wait; each still gets its own tokens."""
    crowded = Watched(make_engine(checkpoint, num_blocks=7))
    roomy = Watched(make_engine(checkpoint))
    assert sampled(crowded, 40, 6, temperature=1.0) == sampled(roomy, 40, 6, temperature=1.0)
    assert crowded.engine.scheduler.totals.preemptions > 0
