"""The C backend against the torch network, and against itself: every family, both words, any schedule."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.model.cpu import Built, CWorld, c_dense, c_runner, checkpoint, native
from tests.model.cpu_checks import check_rows, check_schedule, check_values, same_bits, tokens_of
from tests.model.paged import Span
from tests.model.tiny import WIDE


@pytest.fixture(scope="module", params=["f32", "bf16"])
def built(request: pytest.FixtureRequest) -> Built:
    return native(request.param)


@pytest.mark.parametrize("architecture", WIDE)
def test_values_are_those_of_the_torch_network(architecture: str, built: Built) -> None:
    check_values(architecture, built)


@pytest.mark.parametrize("index, architecture", list(enumerate(WIDE)))
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_any_schedule_equals_one_pass(index: int, architecture: str, block_size: int, built: Built) -> None:
    check_schedule(architecture, built, block_size, threads=1 + (index + block_size // 16) % 3, seed=index)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_rows_change_a_bit(threads: int, built: Built) -> None:
    check_rows("wide llama3", built, threads)


def test_a_gap_repaired_beside_others(built: Built) -> None:
    """Lost blocks are recomputed with the tail, beside a decode and a fresh prompt: the bits are those of one pass."""
    architecture = "wide qwen3"
    config = checkpoint(architecture)[0]
    requests = [tokens_of(architecture, length, seed=length) for length in (170, 129, 50)]
    runner = c_runner(architecture, built, threads=2)
    expected = [c_dense(config, runner, built.dtype, tokens) for tokens in requests]
    world = CWorld(config, runner, built.dtype, requests)
    world.step([Span(0, 0, 169), Span(1, 0, 128)])
    for block in (1, 2, 6):
        world.forget(0, block)
    spans = [Span(0, 16, 48), Span(0, 96, 112), Span(0, 169, 170), Span(1, 128, 129), Span(2, 0, 50)]
    for span, logits in zip(spans, world.step(spans), strict=True):
        assert same_bits(logits, expected[span.request][span.start : span.end])


@pytest.mark.parametrize("rows", [[], [0], [39], [17, 3, 3, 38], [20, 21, 22, 39, 0]], ids=str)
def test_logits_of_the_rows_that_are_asked_for(rows: list[int], built: Built) -> None:
    """None at all, in any order, one twice; K and V are written all the same."""
    config = checkpoint("wide llama2")[0]
    tokens = tokens_of("wide llama2", 40)
    runner = c_runner("wide llama2", built, threads=2)
    expected = c_dense(config, runner, built.dtype, tokens)
    world = CWorld(config, runner, built.dtype, [tokens])
    logits = runner.run(world.inputs([Span(0, 0, 21), Span(0, 21, 40)], logit_rows=rows))
    assert same_bits(logits, expected[rows])
    later = world.step([Span(0, 39, 40)])[0]
    assert same_bits(later, expected[39:])


def test_a_step_reads_no_block_but_its_own(built: Built) -> None:
    """Every other block is full of NaN (CWorld), also block 0, which fills up tables."""
    config = checkpoint("wide mistral")[0]
    requests = [tokens_of("wide mistral", length, seed=length) for length in (150, 5)]
    runner = c_runner("wide mistral", built)
    world = CWorld(config, runner, built.dtype, requests, rng=random.Random(3))
    free = set(range(world.num_blocks)) - {block for table in world.tables for block in table}
    assert 0 in free and all(world.storage.blocks[block].isnan().all() for block in free)
    for logits in world.step([Span(0, 0, 150), Span(1, 0, 5)]):
        assert logits.isfinite().all()
    assert all(world.storage.blocks[block].isnan().all() for block in free)


def test_nan_is_not_hidden(built: Built) -> None:
    """A NaN that is attended to comes out, so that its request fails, and no other one's."""
    config = checkpoint("wide llama3")[0]
    requests = [tokens_of("wide llama3", 40), tokens_of("wide llama3", 40, seed=2)]
    runner = c_runner("wide llama3", built)
    world = CWorld(config, runner, built.dtype, requests)
    expected = [logits[-1:].clone() for logits in world.step([Span(0, 0, 40), Span(1, 0, 40)])]
    world.forget(0, 1)
    sick, sound = world.step([Span(0, 39, 40), Span(1, 39, 40)])
    assert sick.isnan().all() and same_bits(sound, expected[1])


def test_rows_beyond_an_earlier_step(built: Built) -> None:
    """Memory grows with the steps, and small steps after large ones are what they were."""
    config = checkpoint("wide smollm2")[0]
    runner = c_runner("wide smollm2", built)
    tokens = tokens_of("wide smollm2", 170)
    few = c_dense(config, runner, built.dtype, tokens[:3])
    c_dense(config, runner, built.dtype, tokens)
    assert same_bits(c_dense(config, runner, built.dtype, tokens[:3]), few)


def test_a_closed_runner_lets_its_threads_go() -> None:
    before = _threads()
    runner = c_runner("wide llama3", native("f32"), threads=3)
    assert _threads() == before + 2
    runner.close()
    assert _threads() == before


def _threads() -> int:
    """Of this process, as the operating system counts them."""
    return len(list(Path("/proc/self/task").iterdir()))
