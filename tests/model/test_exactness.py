"""On CPU a row's logits are the same bits however its context was computed and whatever is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from model.network import Network
from tests.model.paged import PagedWorld, Span, dense, make_network, random_tokens
from tests.model.tiny import VOCAB_SIZE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# GQA with two query heads per K/V head; three (which divides no tile); one (MHA); q/k norm.
NETWORKS = ["llama3", "smollm2", "llama2", "qwen3"]


def _random_steps(rng: random.Random, lengths: list[int]) -> Iterator[list[Span]]:
    """Cut every request into spans and deal them out over steps, several per request and step, in any company."""
    done = [0] * len(lengths)
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        step: list[Span] = []
        for request, length in enumerate(lengths):
            for _ in range(rng.choice((0, 1, 1, 2))):
                size = min(rng.choice((1, 1, 1, 2, 3, 5, 7, 13, 16, 17, 33, 64, 100, 130)), length - done[request])
                if size:
                    step.append(Span(request, done[request], done[request] + size))
                    done[request] += size
        if step:
            yield step


def _check_schedule(network: Network, block_size: int, seed: int, lengths: list[int]) -> None:
    rng = random.Random(seed)
    requests = [random_tokens(rng, length, VOCAB_SIZE) for length in lengths]
    world = PagedWorld(network, requests, block_size=block_size, rng=rng)
    logits: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in _random_steps(rng, lengths):
        for span, rows in zip(step, world.step(step), strict=True):
            logits[span.request].append(rows)
    for tokens, parts in zip(requests, logits, strict=True):
        assert torch.equal(torch.cat(parts), dense(network, tokens, block_size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", NETWORKS)
@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_any_schedule_equals_one_pass(dtype: torch.dtype, architecture: str, block_size: int) -> None:
    _check_schedule(make_network(architecture, dtype), block_size, seed=block_size, lengths=[290, 33, 128, 7, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_many_short_requests_in_any_schedule(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(100 + seed)
    lengths = [rng.randrange(1, 200) for _ in range(rng.randrange(2, 20))]
    _check_schedule(make_network("llama3", dtype), 16, seed, lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_by_token_equals_one_pass(dtype: torch.dtype) -> None:
    network = make_network("smollm2", dtype)
    tokens = random_tokens(random.Random(7), 140, VOCAB_SIZE)
    world = PagedWorld(network, [tokens])
    logits = torch.cat([world.step([Span(0, position, position + 1)])[0] for position in range(len(tokens))])
    assert torch.equal(logits, dense(network, tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_repaired_gaps_and_tail_in_one_pass(dtype: torch.dtype, seed: int) -> None:
    """Blocks lost anywhere are recomputed with the tail, beside a decode and a fresh prompt."""
    rng = random.Random(seed)
    network = make_network("llama3", dtype)
    requests = [random_tokens(rng, length, VOCAB_SIZE) for length in (290, 129, 50)]
    world = PagedWorld(network, requests, rng=rng)
    world.step([Span(0, 0, 289), Span(1, 0, 128)])
    lost = sorted(rng.sample(range(18), rng.randrange(1, 6)))
    for block in lost:
        world.forget(0, block)
    gaps = [Span(0, block * 16, block * 16 + 16) for block in lost]
    spans = [Span(1, 128, 129), *gaps, Span(0, 289, 290), Span(2, 0, 50)]
    expected = [dense(network, tokens) for tokens in requests]
    for span, rows in zip(spans, world.step(spans), strict=True):
        assert torch.equal(rows, expected[span.request][span.start : span.end])


def test_the_same_gap_repaired_twice_leaves_the_same_bytes() -> None:
    network = make_network("qwen3", torch.bfloat16)
    tokens = random_tokens(random.Random(8), 200, VOCAB_SIZE)
    world = PagedWorld(network, [tokens])
    world.step([Span(0, 0, 200)])
    before = world.pool[world.tables[0]][:12].clone()
    for block in (2, 7):
        world.forget(0, block)
    world.step([Span(0, 32, 48), Span(0, 112, 128), Span(0, 199, 200)])
    assert torch.equal(world.pool[world.tables[0]][:12].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_does_not_matter(dtype: torch.dtype) -> None:
    network = make_network("smollm2", dtype)
    tokens = random_tokens(random.Random(9), 400, VOCAB_SIZE)
    logits = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        world = PagedWorld(network, [tokens, tokens])
        logits.append(torch.cat(world.step([Span(0, 0, 390), Span(1, 0, 17)])[:1] + world.step([Span(0, 390, 400)])))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_span_is_not_spoiled_by_another_requests_nan() -> None:
    """A request whose numbers went wrong shares products with others, not results."""
    network = make_network("llama2")
    rng = random.Random(10)
    requests = [random_tokens(rng, 40, VOCAB_SIZE) for _ in range(3)]
    world = PagedWorld(network, requests)
    world.step([Span(0, 0, 39), Span(1, 0, 39), Span(2, 0, 39)])
    world.forget(1, 0)
    first, spoiled, third = world.step([Span(0, 39, 40), Span(1, 39, 40), Span(2, 39, 40)])
    assert torch.isnan(spoiled).all()
    assert torch.equal(first, dense(network, requests[0])[39:])
    assert torch.equal(third, dense(network, requests[2])[39:])


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf])
def test_stale_slots_are_never_read(fill: float) -> None:
    network = make_network("mistral")
    tokens = random_tokens(random.Random(11), 150, VOCAB_SIZE)
    world = PagedWorld(network, [tokens], block_size=128)
    world.pool.fill_(fill)
    parts = [world.step([Span(0, start, end)])[0] for start, end in ((0, 5), (5, 6), (6, 131), (131, 150))]
    assert torch.equal(torch.cat(parts), dense(network, tokens, block_size=4))
