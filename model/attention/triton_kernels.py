"""Paged attention for GPUs, as Triton kernels: any block size, any number of query heads per K/V head, any span.

A *row* is one (token, query head) pair of a span, for one K/V head; the query heads that share a K/V head lie side by
side, so that each K/V number read serves them all. A tile is `TILE_ROWS` rows of one span. Decode is a tile with few
rows in use, a prompt's chunk and a repaired gap are many tiles; nothing below knows which it is.

    span of 3 tokens, 4 query heads per K/V head:     row   0 1 2 3   4 5 6 7   8 9 10 11
                                                      token 0         1         2

The context is cut into segments of SEGMENT positions and those into runs of TILE_SLOTS, both counted from position 0.
Each segment gives an independent partial (own peak, own total, own mix of values); partials are merged in ascending
order. So the order of every sum is fixed by the row's position, whoever else is in the step:

    positions     0        256       512       768
    segments      |----0----|----1----|----2----|            ((neutral + 0) + 1) + 2

    attend_whole       one program walks all segments of its tile and merges as it goes: many tiles, long spans
    attend_segments    the segments of a tile are dealt out to several programs, which store their partials;
    merge_segments     ... and these merge them: few tiles, long contexts (Flash-Decoding, Dao et al. 2023)

Both ways do the same arithmetic in the same order, and so do tiles of any height; but high tiles are multiplied by
other instructions than low ones on some GPUs, which may round differently within one run of TILE_SLOTS. The compiler
is kept from contracting products and sums on its own (`enable_fp_fusion=False` at launch), since it might do so in one
kernel and not in the other; where one is wanted it is written out.

What a row may not see weighs exactly 0 and what is not written is not loaded: a tile's later rows, a mask and the end
of the context leave no trace in a row's bits.

float32 is multiplied as three products of TF32 halves, which is as good as float32 and uses the matrix units.

Scores are in units of log2, since exp2 is what the hardware has. Online softmax: Milakov and Gimelshein 2018; over
tiles of K/V: FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT = 256
"""Positions per partial result. A partial of one is 1/64 of the K/V it stands for, at 4 query heads per K/V head."""

TILE_SLOTS = 64
"""Positions per product. The same for every tile height: it decides the order of sums."""

TILE_FIELDS = 3
"""A tile is described by three int32: its span, its first row within the span, and the index of its first partial."""


@triton.jit
def _merge(peak, total, mixed, later_peak, later_total, later_mixed):
    """Take in the partial of a later segment. One that saw nothing (peak -inf) leaves the state as it was, exactly."""
    both = tl.maximum(peak, later_peak)
    mine = tl.exp2(peak - both)
    others = tl.exp2(later_peak - both)
    total = tl.fma(total, mine, later_total * others)
    mixed = tl.fma(mixed, tl.broadcast_to(mine[:, None], mixed.shape), later_mixed * others[:, None])
    return both, total, mixed


@triton.jit
def _tile(tiles, bounds, positions, TILE_ROWS: tl.constexpr, HEADS_PER_KV: tl.constexpr):
    """This program's tile -> (span, token [rows], head within the K/V head [rows], in use [rows], position [rows],
    positions it may see, first partial). A row that is not in use looks at position 0 and is not stored."""
    tile = tiles + tl.program_id(0) * 3
    span = tl.load(tile)
    first_row = tl.load(tile + 1)
    start = tl.load(bounds + span)
    count = tl.load(bounds + span + 1) - start
    first_position = tl.load(positions + start).to(tl.int32)
    row = first_row + tl.arange(0, TILE_ROWS)
    token = row // HEADS_PER_KV
    in_use = token < count
    position = tl.where(in_use, first_position + token, 0)
    end = first_position + tl.minimum(count, (first_row + TILE_ROWS - 1) // HEADS_PER_KV + 1)
    return span, start + token, row % HEADS_PER_KV, in_use, position, end, tl.load(tile + 2)


@triton.jit
def _segment(
    query,
    position,
    keys,
    values,
    table,
    begin,
    end,
    scale,
    block_stride,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The partial of positions begin..begin + SEGMENT, as far as `end`: peak and total [rows], mixed [rows, width].

    query [rows, width]. WIDEN multiplies in float32 what is stored in 16 bits (for the interpreter).
    """
    rows: tl.constexpr = query.shape[0]
    width: tl.constexpr = query.shape[1]
    dims = tl.arange(0, width)
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, width], tl.float32)
    for first in range(begin, tl.minimum(begin + SEGMENT, end), TILE_SLOTS):
        slots = first + tl.arange(0, TILE_SLOTS)
        written = slots < end
        block = tl.load(table + slots // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        where = block * block_stride + (slots % BLOCK_SIZE) * SLOT_STRIDE
        key = tl.load(
            keys + where[None, :] + dims[:, None], mask=written[None, :] & (dims[:, None] < HEAD_DIM), other=0.0
        )
        value = tl.load(
            values + where[:, None] + dims[None, :], mask=written[:, None] & (dims[None, :] < HEAD_DIM), other=0.0
        )
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision="tf32x3") * scale
        scores = tl.where(slots[None, :] <= position[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = tl.fma(total, fade, tl.sum(weights, 1))
        weights = weights.to(value.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        mixed = tl.dot(weights, value, mixed * fade[:, None], input_precision="tf32x3")
        peak = new_peak
    return peak, total, mixed


@triton.jit
def _load_query(query, token, head, in_use, token_stride, head_stride, HEAD_DIM, WIDTH, WIDEN):
    """[rows, WIDTH], zero beyond the head's size."""
    dims = tl.arange(0, WIDTH)
    where = token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + dims[None, :]
    rows = tl.load(query + where, mask=in_use[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    return rows.to(tl.float32) if WIDEN else rows


@triton.jit
def _store_output(output, token, head, in_use, total, mixed, token_stride, HEAD_DIM, WIDTH):
    """output [T, num_heads, HEAD_DIM], contiguous."""
    dims = tl.arange(0, WIDTH)
    where = token[:, None].to(tl.int64) * token_stride + head[:, None] * HEAD_DIM + dims[None, :]
    result = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + where, result, mask=in_use[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit
def attend_whole(
    output,
    query,
    keys,
    values,
    tables,
    tiles,
    bounds,
    positions,
    scale,
    output_stride,
    token_stride,
    head_stride,
    block_stride,
    kv_head_stride,
    table_stride,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (tiles, kv_heads): the output of one tile's rows."""
    span, token, group_head, in_use, position, end, _ = _tile(tiles, bounds, positions, TILE_ROWS, HEADS_PER_KV)
    kv_head = tl.program_id(1)
    head = kv_head * HEADS_PER_KV + group_head
    rows = _load_query(query, token, head, in_use, token_stride, head_stride, HEAD_DIM, WIDTH, WIDEN)
    table = tables + span.to(tl.int64) * table_stride
    keys += kv_head * kv_head_stride
    values += kv_head * kv_head_stride
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    for begin in range(0, end, SEGMENT):
        later_peak, later_total, later_mixed = _segment(
            rows, position, keys, values, table, begin, end, scale, block_stride,
            SLOT_STRIDE, BLOCK_SIZE, HEAD_DIM, SEGMENT, TILE_SLOTS, WIDEN,
        )  # fmt: skip
        peak, total, mixed = _merge(peak, total, mixed, later_peak, later_total, later_mixed)
    _store_output(output, token, head, in_use, total, mixed, output_stride, HEAD_DIM, WIDTH)


@triton.jit
def attend_segments(
    peaks,
    totals,
    mixes,
    query,
    keys,
    values,
    tables,
    tiles,
    bounds,
    positions,
    scale,
    token_stride,
    head_stride,
    block_stride,
    kv_head_stride,
    table_stride,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (tiles, kv_heads, lanes): lane l stores the partials of segments l, l + lanes, ... of its tile.

    peaks and totals [partials, kv_heads, TILE_ROWS], mixes [.., WIDTH], float32. Which lane has which segment, and how
    many lanes there are, does not show in the result.
    """
    span, token, group_head, in_use, position, end, partial = _tile(tiles, bounds, positions, TILE_ROWS, HEADS_PER_KV)
    kv_head = tl.program_id(1)
    lane = tl.program_id(2)
    head = kv_head * HEADS_PER_KV + group_head
    rows = _load_query(query, token, head, in_use, token_stride, head_stride, HEAD_DIM, WIDTH, WIDEN)
    table = tables + span.to(tl.int64) * table_stride
    keys += kv_head * kv_head_stride
    values += kv_head * kv_head_stride
    index = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, WIDTH)
    for begin in range(lane * SEGMENT, end, tl.num_programs(2) * SEGMENT):
        peak, total, mixed = _segment(
            rows, position, keys, values, table, begin, end, scale, block_stride,
            SLOT_STRIDE, BLOCK_SIZE, HEAD_DIM, SEGMENT, TILE_SLOTS, WIDEN,
        )  # fmt: skip
        place = (partial + begin // SEGMENT).to(tl.int64) * tl.num_programs(1) + kv_head
        where = place * TILE_ROWS + index
        tl.store(peaks + where, peak, mask=in_use)
        tl.store(totals + where, total, mask=in_use)
        tl.store(mixes + where[:, None] * WIDTH + dims[None, :], mixed, mask=in_use[:, None])


@triton.jit
def merge_segments(
    output,
    peaks,
    totals,
    mixes,
    tiles,
    bounds,
    positions,
    output_stride,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid (tiles, kv_heads): the output of one tile's rows from the partials of its segments."""
    _, token, group_head, in_use, _, end, partial = _tile(tiles, bounds, positions, TILE_ROWS, HEADS_PER_KV)
    kv_head = tl.program_id(1)
    index = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, WIDTH)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    for begin in range(0, end, SEGMENT):
        place = (partial + begin // SEGMENT).to(tl.int64) * tl.num_programs(1) + kv_head
        where = place * TILE_ROWS + index
        later_peak = tl.load(peaks + where, mask=in_use, other=0.0)
        later_total = tl.load(totals + where, mask=in_use, other=1.0)
        later_mixed = tl.load(mixes + where[:, None] * WIDTH + dims[None, :], mask=in_use[:, None], other=0.0)
        peak, total, mixed = _merge(peak, total, mixed, later_peak, later_total, later_mixed)
    head = kv_head * HEADS_PER_KV + group_head
    _store_output(output, token, head, in_use, total, mixed, output_stride, HEAD_DIM, WIDTH)


@triton.jit
def write_slots(
    keys,
    values,
    new_keys,
    new_values,
    slots,
    block_stride,
    kv_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Grid (tokens): K and V of one token, all heads, into its slot. A slot of -1 is nowhere: nothing is written.

    NUMBERS is KV_HEADS * HEAD_DIM rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    number = tl.arange(0, NUMBERS)
    head = number // HEAD_DIM
    dim = number % HEAD_DIM
    mask = (number < KV_HEADS * HEAD_DIM) & (slot >= 0)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * SLOT_STRIDE + head * kv_head_stride + dim
    key = tl.load(new_keys + token * key_token_stride + head * key_head_stride + dim, mask=mask)
    value = tl.load(new_values + token * value_token_stride + head * value_head_stride + dim, mask=mask)
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=mask)
