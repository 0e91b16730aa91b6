"""Decode steps as CUDA graphs: one launch in place of some hundreds, which is what a small step's time goes into.

A step of spans of length 1 is computed by replaying a graph that was captured for as many rows or a few more. A graph
repeats the very launches it was captured with, on the same addresses, so:

- inputs are copied into buffers that never move, and logits are copied out of one;
- sizes on the host are those of the capture: they bound what a step may hold, and the kernels read what it does hold
  from the buffers (`Attention.capturable` says that a backend can do so);
- rows beyond the step's own are padding: token 0 at position 0, and a slot of -1, which is nowhere. They read the first
  slot of block 0, whatever it holds, and nobody reads what becomes of it.

    step of 5:    | r0 | r1 | r2 | r3 | r4 | padding | padding | padding |    replays the graph of 8

Graphs are captured when first needed, each after a plain run that compiles and loads its kernels. What they compute is
what the network computes without them; where one cannot be used, it is computed without.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable

import torch

from model.inputs import StepInputs

log = logging.getLogger("pagekv.cuda_graphs")

Replay = Callable[[], object]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a function once or more, and returns what does the same again."""

ROW_COUNTS = (1, 2, 4, *range(8, 64, 8), *range(64, 129, 16))
"""Rows that graphs are captured for; above 8 at most a quarter more than the step has, plus 8."""

SMALLEST_TOTAL = 4096
"""Graphs differ by the sum of their contexts too, in powers of two from here on: it sizes attention's scratch."""

MAX_GRAPHS = 48
"""Captured at one time; the one not used for longest goes first."""


class DecodeGraphs:
    """Replays steps of single tokens through `forward`, which gives the logits of its inputs' `logit_rows`.

    `max_len` bounds the context of a request. Whatever `forward` grows on demand must have grown to it before.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        capture: Capture,
        *,
        max_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        rows = ROW_COUNTS[-1]
        self._forward = forward
        self._capture = capture
        self._max_len = max_len
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros((rows, -(-max_len // block_size)), dtype=torch.int32, device=device)
        self._all_rows = torch.arange(rows, device=device)
        self._vocab_size = vocab_size
        self._logits: torch.Tensor | None = None  # [rows, vocab_size], made when it is first needed
        self._graphs: OrderedDict[tuple[int, int], Replay] = OrderedDict()
        self._broken = False

    def accepts(self, inputs: StepInputs) -> bool:
        """Whether `inputs` are a step that graphs are made for."""
        return (
            not self._broken
            and len(inputs.q_len) == inputs.token_ids.shape[0] <= ROW_COUNTS[-1]
            and not inputs.adapters
            and max(inputs.kv_len) <= self._max_len
        )

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits [N, vocab_size] of accepted inputs, in memory of their own; None if no graph could be captured, after
        which nothing is accepted any more."""
        rows = ROW_COUNTS[bisect_left(ROW_COUNTS, len(inputs.q_len))]
        total = max(SMALLEST_TOTAL, 1 << (sum(inputs.kv_len) + rows - 1).bit_length())
        self._fill(inputs, rows)
        replay = self._find(rows, total)
        if replay is None:
            return None
        replay()
        assert self._logits is not None
        return self._logits.index_select(0, inputs.logit_rows)

    def _fill(self, inputs: StepInputs, rows: int) -> None:
        count, width = inputs.block_tables.shape
        self._token_ids[:count].copy_(inputs.token_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(inputs.slots)
        self._tables[:count, :width].copy_(inputs.block_tables)
        if rows > count:
            self._token_ids[count:rows].zero_()
            self._positions[count:rows].zero_()
            self._slots[count:rows].fill_(-1)
            self._tables[count:rows, 0].zero_()

    def _find(self, rows: int, total: int) -> Replay | None:
        key = (rows, total)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        try:
            self._graphs[key] = self._capture(self._step(rows, total))
        except RuntimeError as error:  # of torch, of the driver, or out of memory
            log.warning("decode steps go without CUDA graphs: %s", error)
            self._broken = True
            self._graphs.clear()
            return None
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return self._graphs[key]

    def _step(self, rows: int, total: int) -> Callable[[], None]:
        """What is captured: the network over the first `rows` of the buffers."""
        if self._logits is None:
            shape = (len(self._token_ids), self._vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._token_ids.device)
        logits = self._logits[:rows]
        inputs = StepInputs(
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            slots=self._slots[:rows],
            q_len=(1,) * rows,
            kv_len=_bounds(rows, total, self._max_len),
            block_tables=self._tables[:rows],
            logit_rows=self._all_rows[:rows],
        )

        def step() -> None:
            logits.copy_(self._forward(inputs))

        return step


def _bounds(rows: int, total: int, max_len: int) -> tuple[int, ...]:
    """Lengths of contexts whose greatest and whose sum no step of the graph exceeds."""
    return (max_len, *(min(max_len, -(-total // rows)),) * (rows - 1))


class CudaCapture:
    """Captures on the current device. All graphs share their memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a plain run first: a capture may neither compile a kernel nor load one
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay
