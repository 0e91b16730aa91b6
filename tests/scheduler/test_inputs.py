"""From a batch to flat tensors: slots, tables, rows of logits, what the sampler is told."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from model.inputs import StepInputs
from model.sampler import SampleRow
from scheduler.batch import Batch
from scheduler.inputs import flatten, sample_rows
from scheduler.request import Request
from tests.scheduler.world import World

P = list(range(40, 80))
CPU = torch.device("cpu")


def inputs(world: World, batch: Batch) -> StepInputs:
    return flatten(batch, world.block_size, CPU)


def schedule(world: World) -> Batch:
    return world.scheduler.schedule(world.clock)


def slot(world: World, request: Request, position: int) -> int:
    block = request.table[position // world.block_size]
    assert block is not None
    return block.block_id * world.block_size + position % world.block_size


def check(world: World, batch: Batch) -> StepInputs:
    """What holds of every batch, derived anew from its spans."""
    flat = inputs(world, batch)
    spans = batch.spans
    pairs = [(span.request, position) for span in spans for position in range(span.start, span.end)]
    assert flat.token_ids.tolist() == [request.tokens[position] for request, position in pairs]
    assert flat.positions.tolist() == [position for _, position in pairs]
    assert flat.slots.tolist() == [slot(world, request, position) for request, position in pairs]
    assert len(set(flat.slots.tolist())) == len(pairs), "a slot is written twice"
    assert flat.q_len == tuple(span.end - span.start for span in spans)
    assert flat.kv_len == tuple(span.end for span in spans)
    for row, span in enumerate(spans):
        width = -(-span.end // world.block_size)
        table = flat.block_tables[row].tolist()
        assert table[:width] == [block.block_id for block in span.request.table[:width] if block is not None]
        assert table[width:] == [0] * (len(table) - width)
    rows = flat.logit_rows.tolist()
    assert len(rows) == len(batch.sampled)
    for row, request in zip(rows, batch.sampled, strict=True):
        assert pairs[row] == (request, len(request.tokens) - 1)
    for tensor in (flat.token_ids, flat.positions, flat.slots, flat.logit_rows):
        assert tensor.dtype is torch.int64
    assert flat.block_tables.dtype is torch.int32
    return flat


def test_one_prompt() -> None:
    world = World(block_size=4)
    world.add("a", P[:6], 2)
    flat = check(world, schedule(world))
    assert flat.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.logit_rows.tolist() == [5] and flat.block_tables.shape == (1, 2)


def test_a_chunk_that_is_not_the_last_wants_no_logits() -> None:
    world = World(block_size=4, budget=5)
    world.add("a", P[:6], 2)
    flat = check(world, schedule(world))
    assert flat.logit_rows.shape == (0,)
    assert flat.kv_len == (5,)


def test_gaps_and_the_last_position_in_one_pass() -> None:
    world = World(block_size=4)
    world.complete("first", P[:18])
    world.drop(P[:18], 1, 3)
    world.add("again", P[:18], 2)
    flat = check(world, schedule(world))
    assert flat.positions.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 17]
    assert flat.q_len == (4, 4, 1) and flat.kv_len == (8, 16, 18)
    assert flat.block_tables.shape == (3, 5) and flat.logit_rows.tolist() == [8]


def test_decoding_beside_a_prompt_and_a_gap() -> None:
    world = World(block_size=4, num_blocks=32)
    for name, prompt in [("a", P[:9]), ("b", P[20:25])]:
        world.add(name, prompt, 9)
    world.step()
    world.add("c", P[30:37], 9)
    world.drop(P[:9], 1)
    flat = check(world, schedule(world))
    assert flat.positions.tolist() == [4, 5, 6, 7, 9, 5, *range(7)]
    assert flat.q_len == (4, 1, 1, 7) and flat.kv_len == (8, 10, 6, 7)
    assert flat.logit_rows.tolist() == [4, 5, 12]


def test_sharers_read_the_blocks_another_request_writes_in_the_same_pass() -> None:
    world = World(block_size=4)
    world.add("writer", [*P[:8], 1], 2)
    world.add("sharer", [*P[:8], 2], 2)
    flat = check(world, schedule(world))
    writer, sharer = flat.block_tables.tolist()
    assert flat.q_len == (9, 1) and writer[:2] == sharer[:2] and writer[2] != sharer[2]
    assert flat.logit_rows.tolist() == [8, 9]


@pytest.mark.parametrize("budget", [1, 3, 8, 40])
def test_every_batch_of_a_busy_world(budget: int) -> None:
    world = World(block_size=4, num_blocks=20, budget=budget, max_num_seqs=5)
    for number in range(8):
        world.add(f"r{number}", P[number % 3 : 5 + 3 * number], 4, number % 2)
    run = world._run
    world._run = lambda batch: (check(world, batch), run(batch))[1]  # type: ignore[method-assign]
    world.run()


# -- what the sampler is told --------------------------------------------------------------------------------------


def one_request(**sampling: object) -> tuple[World, Request]:
    world = World(block_size=4)
    world.add("a", P[:6], 9, **sampling)
    world.step()
    return world, world.scheduler.running[0]


def history(row: SampleRow) -> tuple[dict[int, int], list[int]]:
    """How often each token is in the output, of those that a penalty may change; the ends of bad words."""
    ids, counts = row.history.seen()
    return dict(zip(ids.tolist(), counts.tolist(), strict=True)), list(row.history.bad_ends())


def test_a_row_knows_its_position_and_params() -> None:
    _, request = one_request()
    (row,) = sample_rows([request], (7, 8))
    assert row.position == 7 and row.history.params is request.params
    assert list(row.banned_ids) == [] and history(row) == ({}, [])


@pytest.mark.parametrize(
    ("penalty", "is_of_prompt"),
    [({"repetition_penalty": 1.1}, True), ({"presence_penalty": 0.5}, False), ({"frequency_penalty": -0.5}, False)],
)
def test_a_history_grows_with_its_request(penalty: dict[str, object], is_of_prompt: bool) -> None:
    world, request = one_request(**penalty)
    prompt = dict.fromkeys(P[:6], 0) if is_of_prompt else {}
    (first,) = sample_rows([request], ())
    assert history(first)[0] == prompt | Counter(world.tokens["a"])
    world.step()
    world.step()
    (later,) = sample_rows([request], ())
    assert later.history is first.history and later.history.num_output == 3
    assert history(later)[0] == prompt | Counter(world.tokens["a"])


def test_bad_words_are_looked_for_at_the_end_of_the_output() -> None:
    world, request = one_request()
    said = world.tokens["a"][0]
    world, request = one_request(bad_words=((said, 2), (P[5], said, 3), (4,)))
    (row,) = sample_rows([request], ())
    assert history(row)[1] == [2, 4]


@pytest.mark.parametrize(
    ("sampling", "banned"),
    [
        ({"min_tokens": 1}, []),
        ({"min_tokens": 2}, [7, 8]),
        ({"min_tokens": 2, "stop_token_ids": (3,)}, [3, 7, 8]),
        ({"min_tokens": 2, "stop_token_ids": (3,), "ignore_eos": True}, [3]),
        ({"stop_token_ids": (3,)}, []),
    ],
)
def test_what_would_end_a_request_too_early_is_banned(sampling: dict[str, object], banned: list[int]) -> None:
    """One token has been sampled already."""
    _, request = one_request(**sampling)
    (row,) = sample_rows([request], (7, 8))
    assert sorted(row.banned_ids) == banned


def test_a_mask_goes_to_the_row_of_its_request() -> None:
    world, request = one_request()
    mask = np.zeros(4, dtype=np.uint32)
    assert sample_rows([request], (), {"a": mask})[0].mask is mask
    assert sample_rows([request], (), {"b": mask})[0].mask is None
