"""CUDA graphs without a GPU: a graph that simply runs its function again shows what goes into it and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from model.attention.triton_paged import TritonAttention
from model.cuda_graphs import MAX_GRAPHS, ROW_COUNTS, DecodeGraphs
from model.inputs import AdapterRows, StepInputs
from model.lora import LoraAdapter
from tests.model.paged import PagedWorld, Span, make_network

CPU = torch.device("cpu")
VOCAB = 7
MAX_LEN = 64
BLOCK_SIZE = 4


def _again(function: Callable[[], None]) -> Callable[[], object]:
    function()
    return function


class Recorder:
    """Stands for the network: keeps what it is given, and answers with logits that tell the token and position."""

    def __init__(self) -> None:
        self.given: list[StepInputs] = []

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        tensors = ("token_ids", "positions", "slots", "block_tables", "logit_rows")
        self.given.append(replace(inputs, **{name: getattr(inputs, name).clone() for name in tensors}))
        told = inputs.token_ids * 1000 + inputs.positions
        return told[inputs.logit_rows, None].float() + torch.arange(VOCAB)


def _graphs(forward: Callable[[StepInputs], torch.Tensor], capture: Callable[..., object] = _again) -> DecodeGraphs:
    return DecodeGraphs(forward, capture, max_len=MAX_LEN, block_size=BLOCK_SIZE, vocab_size=VOCAB, device=CPU)


def _decode(positions: list[int], logit_rows: list[int] | None = None) -> StepInputs:
    count = len(positions)
    width = max(positions) // BLOCK_SIZE + 1
    return StepInputs(
        token_ids=torch.arange(1, count + 1),
        positions=torch.tensor(positions),
        slots=torch.tensor([100 + position for position in positions]),
        q_len=(1,) * count,
        kv_len=tuple(position + 1 for position in positions),
        block_tables=torch.arange(1, count * width + 1, dtype=torch.int32).view(count, width),
        logit_rows=torch.tensor(list(range(count)) if logit_rows is None else logit_rows, dtype=torch.int64),
    )


def test_a_step_is_padded_to_a_captured_size_and_padding_goes_nowhere() -> None:
    network = Recorder()
    inputs = _decode([9, 3, 60])
    logits = _graphs(network).run(inputs)
    assert logits is not None
    assert logits[:, 0].tolist() == [1009, 2003, 3060]
    given = network.given[-1]
    assert given.token_ids.tolist() == [1, 2, 3, 0]
    assert given.positions.tolist() == [9, 3, 60, 0]
    assert given.slots.tolist() == [109, 103, 160, -1]
    assert given.block_tables.shape == (4, MAX_LEN // BLOCK_SIZE)
    assert torch.equal(given.block_tables[:3], inputs.block_tables)
    assert given.block_tables[3, 0] == 0
    assert given.q_len == (1, 1, 1, 1)


def test_rows_that_were_real_are_padding_later() -> None:
    network = Recorder()
    graphs = _graphs(network)
    graphs.run(_decode([9, 3, 60, 20]))
    graphs.run(_decode([9, 3, 4]))
    assert network.given[-1].slots.tolist() == [109, 103, 104, -1]
    assert network.given[-1].block_tables[3, 0] == 0


def test_only_the_wanted_logits_come_back_in_their_order_and_stay() -> None:
    graphs = _graphs(Recorder())
    first = graphs.run(_decode([9, 3, 60], logit_rows=[2, 0]))
    assert first is not None
    graphs.run(_decode([1, 2, 3]))
    assert first[:, 0].tolist() == [3060, 1009]
    nothing = graphs.run(_decode([5], logit_rows=[]))
    assert nothing is not None
    assert nothing.shape == (0, VOCAB)


def test_a_graph_is_captured_once_for_a_size() -> None:
    captured: list[object] = []

    def capture(function: Callable[[], None]) -> Callable[[], object]:
        captured.append(function)
        return _again(function)

    graphs = _graphs(Recorder(), capture)
    for count in (3, 4, 3, 1, 5, 7, 8):
        graphs.run(_decode([5] * count))
    assert len(captured) == 3  # of 4, 1 and 8 rows


@pytest.mark.parametrize("positions", [[63], [63] * 8, [0, 63, 0], [5] * 11, [63] * 128])
def test_sizes_on_the_host_bound_what_the_step_holds(positions: list[int]) -> None:
    network = Recorder()
    inputs = _decode(positions)
    _graphs(network).run(inputs)
    bounds = network.given[-1].kv_len
    padded = network.given[-1].positions + 1
    assert len(bounds) == len(padded)
    assert max(bounds) >= int(padded.max())
    assert sum(bounds) >= int(padded.sum())
    assert max(bounds) <= MAX_LEN  # what has been reserved, such as rotary angles


def test_old_graphs_make_room() -> None:
    graphs = _graphs(Recorder())
    for rows in ROW_COUNTS:
        graphs._find(rows, 1)
    for total in range(2, MAX_GRAPHS + 9):
        graphs._find(1, total)
    assert len(graphs._graphs) == MAX_GRAPHS
    assert (1, 2) not in graphs._graphs
    assert (1, MAX_GRAPHS + 8) in graphs._graphs


def test_what_is_not_a_decode_step_is_not_accepted() -> None:
    graphs = _graphs(Recorder())
    plain = _decode([5, 6])
    assert graphs.accepts(plain)
    assert not graphs.accepts(replace(plain, q_len=(2,), kv_len=(7,)))
    assert not graphs.accepts(_decode([MAX_LEN]))
    assert not graphs.accepts(_decode([1] * (ROW_COUNTS[-1] + 1)))
    adapter = AdapterRows(torch.tensor([0]), LoraAdapter({}, b"", 1))
    assert not graphs.accepts(replace(plain, adapters=(adapter,)))


def test_after_a_failed_capture_nothing_is_accepted() -> None:
    def fail(_: Callable[[], None]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = _graphs(Recorder(), fail)
    inputs = _decode([5, 6])
    assert graphs.run(inputs) is None
    assert not graphs.accepts(inputs)


def test_every_row_count_is_covered() -> None:
    assert sorted(ROW_COUNTS) == list(ROW_COUNTS)
    assert ROW_COUNTS[0] == 1


REQUESTS = [list(range(3, 23)), list(range(40, 49)), [7, 7, 9]]
PREFILL = [Span(0, 0, 19), Span(1, 0, 8), Span(2, 0, 2)]
DECODE = [Span(0, 19, 20), Span(1, 8, 9), Span(2, 2, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here; benchmarks/gpu.py compares them")
def test_the_network_gives_the_same_and_writes_no_other_slot() -> None:
    network = make_network("llama3")
    plain, graphed = (PagedWorld(network, REQUESTS, attention=TritonAttention(16, 1)) for _ in range(2))
    for world in (plain, graphed):
        world.pool[0] = 0.5  # padding reads its first slot
        world.step(PREFILL)
    network.reserve(64)
    graphs = DecodeGraphs(
        graphed.runner._forward,
        _again,
        max_len=64,
        block_size=16,
        vocab_size=network.config.vocab_size,
        device=CPU,
    )
    logits = graphs.run(graphed.inputs(DECODE))
    assert logits is not None
    assert torch.allclose(logits, torch.cat(plain.step(DECODE)), atol=1e-5)
    # NaN is what was never written.
    assert torch.allclose(graphed.pool, plain.pool, atol=1e-5, equal_nan=True)
    assert graphed.pool[0].eq(0.5).all()
