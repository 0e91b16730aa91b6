"""Attention of the C backend over long contexts: however segments are shared out over threads, the bits are those of
one pass on one thread."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests.model.cpu import Built, CWorld, c_dense, c_runner, checkpoint, native
from tests.model.cpu_checks import same_bits
from tests.model.paged import Span, random_tokens
from tests.model.tiny import MANY_HEADS

LENGTHS = {
    MANY_HEADS: (1500, 900, 385, 257, 130, 40),  # pieces of some of the 8 heads, or of one
    "wide smollm2": (500, 385, 300, 129, 128, 1),  # one K/V head
    "wide qwen3": (500, 258, 257, 127, 40, 17),  # heads of 96
}
"""Of requests with 12 segments of keys to less than one, in and beside whole segments and tiles."""


@dataclass(frozen=True)
class Long:
    """Requests whose K/V are in the pool, and the logits of all their rows."""

    architecture: str
    built: Built
    world: CWorld
    expected: list[torch.Tensor]

    def check(self, spans: list[Span], threads: int) -> None:
        runner = c_runner(self.architecture, self.built, threads=threads)
        runner.attach(self.world.storage.blocks)
        self.world.runner = runner
        for span, logits in zip(spans, self.world.step(spans), strict=True):
            assert same_bits(logits, self.expected[span.request][span.start : span.end])
        runner.close()

    def tails(self, *rows: int) -> list[Span]:
        """The last rows of the first requests; a single number is for all of them."""
        lengths = [len(tokens) for tokens in self.world.requests]
        counts = rows * len(lengths) if len(rows) == 1 else rows
        return [
            Span(request, max(0, length - count), length)
            for request, (length, count) in enumerate(zip(lengths, counts, strict=False))
            if count
        ]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def built(request: pytest.FixtureRequest) -> Built:
    return native(request.param)


@pytest.fixture(scope="module", params=list(LENGTHS))
def contexts(request: pytest.FixtureRequest, built: Built) -> Long:
    architecture = request.param
    config = checkpoint(architecture)[0]
    rng = random.Random(0)
    requests = [random_tokens(rng, length, config.vocab_size) for length in LENGTHS[architecture]]
    runner = c_runner(architecture, built)
    expected = [c_dense(config, runner, built.dtype, tokens) for tokens in requests]
    world = CWorld(config, runner, built.dtype, requests, rng=rng)
    world.step([Span(index, 0, len(tokens)) for index, tokens in enumerate(requests)])
    assert all(logits.isfinite().all() for logits in expected)
    return Long(architecture, built, world, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_decode_rows(threads: int, contexts: Long) -> None:
    """Every request alone, so that threads have parts of it and nothing else; and all together."""
    for tail in contexts.tails(1):
        contexts.check([tail], threads)
    contexts.check(contexts.tails(1), threads)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_groups_that_are_cut_anywhere(threads: int, contexts: Long) -> None:
    """Contexts of any length before the long one move the boundaries through it."""
    for position in range(0, 40, 5):
        contexts.check([Span(5, 0, 1), Span(1, position, position + 1), *contexts.tails(1)[:1]], threads)


def test_more_threads_than_parts(contexts: Long) -> None:
    contexts.check([Span(0, 3, 4)], threads=6)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rows", [(2,), (3,), (7,), (1, 300, 1), (300, 1, 12, 1), (1, 9, 100, 5, 1)], ids=str)
def test_narrow_and_wide_groups(rows: tuple[int, ...], threads: int, contexts: Long) -> None:
    contexts.check(contexts.tails(*rows), threads)


def test_rows_on_both_sides_of_a_segments_end(contexts: Long) -> None:
    """Some of a group's rows have a segment more than the others."""
    for start, end in ((126, 129), (120, 135), (127, 128), (128, 129), (250, 258)):
        contexts.check([Span(0, start, end), Span(1, start, end)], threads=3)


def test_gaps_beside_tails(contexts: Long) -> None:
    """Several groups of one request in a step, of either kind."""
    spans = [Span(0, 16, 32), Span(0, 128, 260), Span(0, 300, 301), *contexts.tails(1)]
    contexts.check(spans, threads=2)


@pytest.mark.parametrize("seed", range(4))
def test_any_spans(seed: int, contexts: Long) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        spans = []
        for request, tokens in enumerate(contexts.world.requests):
            size = min(len(tokens), rng.choice((0, 1, 1, 1, 2, 5, 11, 24, 64)))
            start = rng.randint(0, len(tokens) - size)
            if size:
                spans.append(Span(request, start, start + size))
        contexts.check(spans or contexts.tails(1), threads=1 + seed)


def test_room_for_partials_grows_and_stays(contexts: Long) -> None:
    """Short contexts, then long ones, then short ones again, on one engine."""
    world = contexts.world
    runner = c_runner(contexts.architecture, contexts.built, threads=2)
    runner.attach(world.storage.blocks)
    for end in (200, 500, 140, 300):
        logits = runner.run(world.inputs([Span(0, end - 1, end)]))
        assert same_bits(logits, contexts.expected[0][end - 1 : end])
