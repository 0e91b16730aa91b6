"""The Triton backend: cuts a step's spans into tiles of rows and launches the kernels of `triton_kernels`.

Spans of few rows (decode, a short repaired gap) go in low tiles, longer ones in high tiles. Where there are too few
tiles to fill the GPU, the segments of each are dealt out to several programs. Neither choice changes the order of a
sum (see the kernels).

What a captured CUDA graph needs: for a step of spans of length 1, `prepare` works out everything on the device from
the tensors of its inputs; the tuple `kv_len` only bounds sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from model.attention import triton_kernels as kernels
from model.attention.base import Planes
from model.attention.triton_kernels import SEGMENT, TILE_FIELDS, TILE_SLOTS
from model.attention.upload import upload
from model.inputs import StepInputs

MAX_BLOCK_SIZE = 128

LOG2_E = 1.4426950408889634

LAUNCH = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How tiles of one height run. `programs` is how many of them one multiprocessor holds, with some to spare."""

    rows: int
    warps: int
    stages: int
    programs: int


LOW = Tiling(rows=16, warps=4, stages=2, programs=8)
"""As few rows as a matrix instruction takes. Compiled for compute capability 8.0 and 9.0 at head size 128, a program
takes 124 registers a thread and 38 KiB of shared memory: four fit, each with a tile of K and V under way."""

HIGH = Tiling(rows=64, warps=4, stages=2, programs=2)
"""Two accumulators of 64 x 128 fill the registers of four warps: two fit."""


def high_tiling(dtype: torch.dtype, width: int) -> Tiling:
    """How spans of many rows are cut: what would not fit the registers goes in low tiles."""
    return HIGH if dtype.itemsize == 2 and width <= 128 else LOW


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of one height: int32 [n, TILE_FIELDS] on the device, and as much as the launch must know of them."""

    tiling: Tiling
    table: torch.Tensor
    partials: int  # as many as all of them have segments, or more
    segments: int  # as many as any of them has, or more


class TritonAttention:
    """The backend on one device. `processors` is the device's number of multiprocessors: what there is to fill.

    Errors: ValueError for a block size that is not a power of two up to 128.
    """

    numerics = f"triton-{triton.__version__}-segment{SEGMENT}-tile{TILE_SLOTS}"
    capturable = True

    def __init__(self, block_size: int, processors: int) -> None:
        if block_size < 1 or MAX_BLOCK_SIZE % block_size:
            raise ValueError(f"block size must be a power of two up to {MAX_BLOCK_SIZE}, not {block_size}")
        self._block_size = block_size
        self._processors = processors
        self._inputs: StepInputs | None = None
        self._bounds = torch.empty(0)
        self._tiles: tuple[_Tiles, ...] = ()

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._tiles = ()  # planned when the number of query heads per K/V head is known

    def write(self, planes: Planes, values: Sequence[torch.Tensor]) -> None:
        assert self._inputs is not None, "prepare() comes first"
        write_slots(planes, values, self._inputs.slots)

    def attend(self, planes: Planes, query: torch.Tensor) -> torch.Tensor:
        assert self._inputs is not None, "prepare() comes first"
        key_plane, _ = planes
        heads_per_kv = query.shape[1] // key_plane.shape[1]
        if not self._tiles:
            high = high_tiling(query.dtype, _width(query.shape[2]))
            self._bounds, self._tiles = _plan(self._inputs, heads_per_kv, high)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for tiles in self._tiles:
            lanes = self._lanes(tiles, key_plane.shape[1])
            if lanes == 1:
                self._whole(tiles, output, query, planes)
            else:
                self._segments(tiles, output, query, planes, lanes)
        return output

    def _lanes(self, tiles: _Tiles, kv_heads: int) -> int:
        """Programs to deal a tile's segments out to; 1 where the tiles fill the device as they are."""
        wanted = self._processors * tiles.tiling.programs
        return min(tiles.segments, -(-wanted // (tiles.table.shape[0] * kv_heads)))

    def _whole(self, tiles: _Tiles, output: torch.Tensor, query: torch.Tensor, planes: Planes) -> None:
        kernels.attend_whole[(tiles.table.shape[0], planes[0].shape[1])](
            output,
            *self._context(tiles, query, planes),
            output.stride(0),
            *self._strides(query, planes[0]),
            **self._shape(tiles.tiling, query, planes[0]),
            num_warps=tiles.tiling.warps,
            num_stages=tiles.tiling.stages,
            **LAUNCH,
        )

    def _segments(self, tiles: _Tiles, output: torch.Tensor, query: torch.Tensor, planes: Planes, lanes: int) -> None:
        kv_heads, width = planes[0].shape[1], _width(query.shape[2])
        rows = tiles.partials, kv_heads, tiles.tiling.rows
        partials = (
            torch.empty(rows, dtype=torch.float32, device=query.device),
            torch.empty(rows, dtype=torch.float32, device=query.device),
            torch.empty((*rows, width), dtype=torch.float32, device=query.device),
        )
        shape = self._shape(tiles.tiling, query, planes[0])
        kernels.attend_segments[(tiles.table.shape[0], kv_heads, lanes)](
            *partials,
            *self._context(tiles, query, planes),
            *self._strides(query, planes[0]),
            **shape,
            num_warps=tiles.tiling.warps,
            num_stages=tiles.tiling.stages,
            **LAUNCH,
        )
        assert self._inputs is not None
        kernels.merge_segments[(tiles.table.shape[0], kv_heads)](
            output,
            *partials,
            tiles.table,
            self._bounds,
            self._inputs.positions,
            output.stride(0),
            **{name: shape[name] for name in ("HEADS_PER_KV", "HEAD_DIM", "WIDTH", "TILE_ROWS", "SEGMENT")},
            num_warps=4,
            num_stages=3,
            **LAUNCH,
        )

    def _context(self, tiles: _Tiles, query: torch.Tensor, planes: Planes) -> tuple[torch.Tensor | float, ...]:
        assert self._inputs is not None
        inputs = self._inputs
        keys, values = planes
        assert keys.stride() == values.stride() and keys.stride(3) == query.stride(2) == 1
        scale = query.shape[2] ** -0.5 * LOG2_E
        return query, keys, values, inputs.block_tables, tiles.table, self._bounds, inputs.positions, scale

    def _strides(self, query: torch.Tensor, plane: torch.Tensor) -> tuple[int, ...]:
        assert self._inputs is not None
        tables = self._inputs.block_tables
        return query.stride(0), query.stride(1), plane.stride(0), plane.stride(1), tables.stride(0)

    def _shape(self, tiling: Tiling, query: torch.Tensor, plane: torch.Tensor) -> dict[str, int | bool]:
        return {
            "SLOT_STRIDE": plane.stride(2),
            "BLOCK_SIZE": self._block_size,
            "HEADS_PER_KV": query.shape[1] // plane.shape[1],
            "HEAD_DIM": query.shape[2],
            "WIDTH": _width(query.shape[2]),
            "TILE_ROWS": tiling.rows,
            "SEGMENT": SEGMENT,
            "TILE_SLOTS": TILE_SLOTS,
            "WIDEN": bool(triton.knobs.runtime.interpret),  # its 16-bit products are wrong (bfloat16) or slow
        }


def write_slots(planes: Planes, values: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """K and V of a step's tokens, [T, kv_heads, head_dim] each, into `slots` int64 [T]; a slot of -1 is left out."""
    (keys, values_plane), (new_keys, new_values) = planes, values
    assert keys.stride() == values_plane.stride() and keys.stride(3) == 1
    assert new_keys.stride(2) == new_values.stride(2) == 1
    _, kv_heads, block_size, head_dim = keys.shape
    kernels.write_slots[(slots.shape[0],)](
        keys,
        values_plane,
        new_keys,
        new_values,
        slots,
        keys.stride(0),
        keys.stride(1),
        new_keys.stride(0),
        new_keys.stride(1),
        new_values.stride(0),
        new_values.stride(1),
        SLOT_STRIDE=keys.stride(2),
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        NUMBERS=triton.next_power_of_2(kv_heads * head_dim),
    )


def _width(head_dim: int) -> int:
    """The width that products are padded to."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _plan(inputs: StepInputs, heads_per_kv: int, high: Tiling) -> tuple[torch.Tensor, tuple[_Tiles, ...]]:
    """-> bounds int32 [S + 1], where each span's tokens begin, and the tiles by height."""
    if max(inputs.q_len) == 1:
        return _plan_single_tokens(inputs, heads_per_kv)
    rows = np.array(inputs.q_len) * heads_per_kv
    is_low = (rows <= LOW.rows) | (high is LOW)
    parts: list[tuple[Tiling, NDArray[np.int32], int, int]] = []
    for tiling, spans in ((LOW, np.flatnonzero(is_low)), (high, np.flatnonzero(~is_low))):
        if len(spans):
            parts.append((tiling, *_cut(inputs, spans, heads_per_kv, tiling.rows)))
    bounds = np.cumsum((0, *inputs.q_len), dtype=np.int32)
    on_device = upload(np.concatenate((bounds, *(part[1].ravel() for part in parts))), inputs.slots.device)
    tiles, start = [], len(bounds)
    for tiling, table, partials, segments in parts:
        end = start + table.size
        tiles.append(_Tiles(tiling, on_device[start:end].view(-1, TILE_FIELDS), partials, segments))
        start = end
    return on_device[: len(bounds)], tuple(tiles)


def _cut(
    inputs: StepInputs, spans: NDArray[np.int64], heads_per_kv: int, tile_rows: int
) -> tuple[NDArray[np.int32], int, int]:
    """-> the tiles of `spans`, the number of all their segments, and the most that one has.

    The tiles that see most come first: the last ones to run then are short, and the device is busy to the end.
    """
    q_len, kv_len = np.array(inputs.q_len)[spans], np.array(inputs.kv_len)[spans]
    rows = q_len * heads_per_kv
    count = -(-rows // tile_rows)
    span = np.repeat(np.arange(len(spans)), count)
    first_row = (np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count)) * tile_rows
    end = (kv_len - q_len)[span] + np.minimum(q_len[span], (first_row + tile_rows - 1) // heads_per_kv + 1)
    order = np.argsort(-end, kind="stable")
    segments = -(-end[order] // SEGMENT)
    first_partial = np.cumsum(segments) - segments
    table = np.stack((spans[span[order]], first_row[order], first_partial), axis=1).astype(np.int32)
    return table, int(segments.sum()), int(segments.max())


def _plan_single_tokens(inputs: StepInputs, heads_per_kv: int) -> tuple[torch.Tensor, tuple[_Tiles, ...]]:
    """A step of spans of length 1, planned on the device: a captured graph repeats this with what its inputs then
    hold. Of `kv_len` only the greatest and the sum are used, as bounds."""
    device, spans = inputs.slots.device, len(inputs.q_len)
    per_span = -(-heads_per_kv // LOW.rows)
    bounds = torch.arange(spans + 1, dtype=torch.int32, device=device)
    span = torch.arange(spans * per_span, device=device) // per_span
    first_row = torch.arange(spans * per_span, device=device) % per_span * LOW.rows
    segments = inputs.positions[span] // SEGMENT + 1
    table = torch.stack((span, first_row, segments.cumsum(0) - segments), dim=1).to(torch.int32)
    partials = per_span * (sum(inputs.kv_len) // SEGMENT + spans)
    return bounds, (_Tiles(LOW, table, partials, -(-max(inputs.kv_len) // SEGMENT)),)
