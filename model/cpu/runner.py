"""The seam between the engine and the C backend: flat inputs in, logits out, as model.runner.Runner with torch."""

from __future__ import annotations

import ctypes
import time
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import ModelConfig
from model.cpu import library as c
from model.cpu.memory import Arena
from model.cpu.pack import PackedMatrix, interleave
from model.cpu.weights import PackedModel
from model.inputs import AdapterRows, StepInputs
from model.lora import LoraAdapter, LowRank
from model.rope import RotaryTable

NUMERICS_VERSION = 1
"""To be counted up with every change to csrc/ that changes bits: K/V of another version are not to be used again."""

_PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class CRunner:
    """A decoder whose step is one call into the library. Not thread-safe; the library has threads of its own.

    `seconds` are those that the parts of the last step took, in the order of library.TIMES. Raises MemoryError.
    """

    def __init__(
        self, config: ModelConfig, weights: PackedModel, library: c.Library, variant: str, *, threads: int
    ) -> None:
        self._config = config
        self._library = library
        self._weights = weights
        self.numerics = f"pagekv-c{NUMERICS_VERSION}/{variant}"
        self._rotary = RotaryTable(config.rope, config.head_dim, torch.device("cpu"))
        self._adapters: weakref.WeakKeyDictionary[LoraAdapter, _PackedAdapter] = weakref.WeakKeyDictionary()
        self._cache: torch.Tensor | None = None
        self._logits = torch.empty(0, config.vocab_size)
        self.seconds = (ctypes.c_double * len(c.TIMES))()
        self._engine = library.open(weights.struct, threads)
        if not self._engine:
            raise MemoryError("the C backend could not start its threads")
        self._finalizer = weakref.finalize(self, library.close, self._engine)

    def attach(self, blocks: torch.Tensor) -> None:
        """The cache to work on: all blocks' bytes, contiguous, in the layout of csrc/pk.h."""
        self._cache = blocks

    def close(self) -> None:
        """Stop the library's threads and free its memory; no step may follow."""
        self._finalizer()

    def measure_quantized(self, block_size: int, dtype: torch.dtype) -> int:
        """Find out up to how many rows a step is faster with quantized weights, and compute so from now on.

        On a cache of its own, of a few milliseconds a step; no bit depends on the outcome. Returns the number of rows.
        """
        attached, config = self._cache, self._config
        words = 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim
        self._cache = torch.zeros(1, words, dtype=dtype)
        best = 0
        for rows in (1, 2, 4, 8, 16):
            dense, quantized = self._time(rows, 0), self._time(rows, rows)
            if quantized >= dense:
                break
            best = rows
        self._cache = attached
        self._library.set_quantized_rows(self._engine, best)
        if best == 0:
            self._weights.forget_quantized()
        return best

    def _time(self, rows: int, quantized_rows: int, repeats: int = 3) -> float:
        """Seconds of a step of `rows` rows: the least of a few, after one that warms up."""
        self._library.set_quantized_rows(self._engine, quantized_rows)
        inputs = _rows_of_one_request(rows)
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            self.run(inputs)
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    def rouse(self) -> None:
        """A step is being prepared: wake the library's threads meanwhile."""
        self._library.rouse(self._engine)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the positions of `inputs`, write their K/V, return float32 logits [N, vocab_size] of `logit_rows`.

        The logits are a view of memory that the next step writes over.
        """
        assert self._cache is not None, "no cache attached"
        ids, positions, slots, tables = map(
            _numbers, (inputs.token_ids, inputs.positions, inputs.slots, inputs.block_tables)
        )
        logit_rows, order = _ascending(_numbers(inputs.logit_rows))
        groups = _groups(inputs)
        last_groups = _last_groups(logit_rows, groups)
        cos, sin = self._rotary.tables(max(inputs.kv_len))
        adapters = [self._adapter(each, logit_rows) for each in inputs.adapters]
        logits = self._room_for(len(logit_rows))
        step = c.Step(
            ids=ids.ctypes.data,
            positions=positions.ctypes.data,
            slots=slots.ctypes.data,
            groups=groups.ctypes.data,
            last_groups=last_groups.ctypes.data,
            logit_rows=logit_rows.ctypes.data,
            tables=tables.ctypes.data,
            adapters=(c.Adapter * len(adapters))(*(each.struct for each in adapters)),
            cache=self._cache.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logits=logits.data_ptr(),
            seconds=self.seconds,
            rows=len(ids),
            num_groups=len(groups),
            num_last_groups=len(last_groups),
            num_logits=len(logit_rows),
            table_width=tables.shape[1],
            num_adapters=len(adapters),
        )
        ctypes.memset(self.seconds, 0, ctypes.sizeof(self.seconds))
        if self._library.step(self._engine, step) != 0:
            raise MemoryError(f"no memory for a step of {len(ids)} rows")
        return logits if order is None else logits[torch.from_numpy(order)]

    def _room_for(self, rows: int) -> torch.Tensor:
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self._config.vocab_size)
        return self._logits[:rows]

    def _adapter(self, rows: AdapterRows, logit_rows: NDArray[np.int64]) -> _AdapterOfStep:
        packed = self._adapters.get(rows.adapter)
        if packed is None:
            packed = self._adapters[rows.adapter] = _PackedAdapter(self._library, rows.adapter, self._config)
        return _AdapterOfStep(packed, _numbers(rows.rows), logit_rows)


def _numbers(tensor: torch.Tensor) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = tensor.contiguous().numpy()
    return numbers


def _ascending(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The rows in ascending order, each once; and where among them the given ones are, None if they were so already."""
    if bool((rows[1:] > rows[:-1]).all()):
        return rows, None
    return np.unique(rows, return_inverse=True)


def _groups(inputs: StepInputs) -> NDArray[np.int32]:
    """[S, 4]: row, count, position and table of each span."""
    groups = np.empty((len(inputs.q_len), c.GROUP_FIELDS), dtype=np.int32)
    groups[:, 1] = inputs.q_len
    groups[:, 0] = groups[:, 1].cumsum() - groups[:, 1]
    groups[:, 2] = inputs.kv_len - groups[:, 1]
    groups[:, 3] = np.arange(len(groups))
    return groups


def _last_groups(logit_rows: NDArray[np.int64], groups: NDArray[np.int32]) -> NDArray[np.int32]:
    """Runs of neighbours among `logit_rows` (ascending), each within one span; rows count among the logits."""
    if len(logit_rows) == len(groups) and bool((groups[:, 1] == 1).all()):
        return groups  # all rows are wanted, as when every request decodes
    if not len(logit_rows):
        return np.empty((0, c.GROUP_FIELDS), dtype=np.int32)
    span = np.searchsorted(groups[:, 0], logit_rows, side="right") - 1
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(logit_rows) != 1) | (np.diff(span) != 0))))
    counts = np.diff(np.append(begins, len(logit_rows)))
    of = span[begins]
    position = groups[of, 2] + logit_rows[begins] - groups[of, 0]
    return np.stack((begins, counts, position, groups[of, 3]), axis=1, dtype=np.int32)


def _rows_of_one_request(rows: int) -> StepInputs:
    """The first positions of a prompt of nothing but token 0, in block 0, all with logits."""
    positions = torch.arange(rows)
    table = torch.zeros(1, 1, dtype=torch.int32)
    return StepInputs(torch.zeros_like(positions), positions, positions, (rows,), (rows,), table, positions)


class _PackedAdapter:
    """An adapter's deltas, [layers][4]; a product that it does not change has no columns."""

    def __init__(self, library: c.Library, adapter: LoraAdapter, config: ModelConfig) -> None:
        self._library = library
        self._arena = Arena()
        self._kept: list[PackedMatrix] = []
        self.deltas = (c.Delta * (4 * config.num_layers))()
        for layer in range(config.num_layers):
            for index, product in enumerate(_PRODUCTS):
                delta = adapter.deltas.get(f"model.layers.{layer}.{product}")
                if delta is not None:
                    self.deltas[4 * layer + index] = self._pack(delta, product)

    def _pack(self, delta: LowRank, product: str) -> c.Delta:
        up = interleave(*delta.up.chunk(2)) if product == "mlp.gate_up_proj" else delta.up
        packed = tuple(PackedMatrix(self._library, self._arena, weight) for weight in (delta.down, up))
        self._kept += packed
        return c.Delta(*(each.struct for each in packed))


class _AdapterOfStep:
    """The rows of one step that an adapter changes, among all rows and among those whose logits are wanted."""

    def __init__(self, packed: _PackedAdapter, rows: NDArray[np.int64], logit_rows: NDArray[np.int64]) -> None:
        self._rows = rows.astype(np.int32)
        self._logits = np.flatnonzero(np.isin(logit_rows, rows)).astype(np.int32)
        self.struct = c.Adapter(
            deltas=packed.deltas,
            rows=self._rows.ctypes.data,
            logits=self._logits.ctypes.data,
            num_rows=len(self._rows),
            num_logits=len(self._logits),
        )
