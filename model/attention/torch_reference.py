"""Paged attention in plain torch: any device, any dtype, and on CPU the same bits for a row whatever its company.

The context of a row is cut into segments of 128 positions, counted from position 0 and not from the row, the span or
the step. Each segment gives an independent partial result (own maximum, own sum, own mix of values), and partials are
merged in ascending order. So what a row computes depends on its position and on the K/V before it, and on nothing else:

    positions     0       128     256     384
    segments      |---0---|---1---|---2---|          (((0) + 1) + 2)
    row at 300     <--------------------->            segment 2: 44 slots masked
    row at 130     <----------->                      segment 2: not in it, its state is left as it was

Spans that are about equally short (all decode rows, say) share one batched product per segment; a long span goes alone.
Only the blocks of the segment at hand are gathered. Everything is computed in float32.

Online softmax: Milakov and Gimelshein 2018; its use over tiles of K/V: FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from model.attention.base import Planes
from model.attention.slots import SlotWriter
from model.inputs import StepInputs
from model.numerics import ROW_MULTIPLE

SEGMENT = 128
"""Positions per partial result; a whole number of blocks, since block sizes are powers of two up to this."""

SHORT = 16
"""Spans of up to this many tokens are batched with others of similar length."""


NEGLIGIBLE = -80.0
"""Scores further below their row's greatest count as this: e**-80 is nothing beside 1, and exp of less is slow."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """One segment of a group of spans: the first `spans` of them reach into it, from row `first_row` on."""

    spans: int
    first_row: int  # a whole number of tiles
    blocks: torch.Tensor  # int64 [spans, SEGMENT / block_size]
    visible: torch.Tensor | None  # bool [spans, 1, rows, SEGMENT]; None: every row sees every slot
    written: torch.Tensor | None  # bool [spans, 1, SEGMENT, 1]; None: every slot is written


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans computed together, longest context first. Rows are (token, query head of the K/V head) pairs.

    tokens [spans, width]: flat index of each span's tokens, the last one repeated up to the widest span's length.
    """

    tokens: torch.Tensor
    kept: torch.Tensor  # int64: indices into tokens.flatten() that are no repetition
    segments: tuple[_Segment, ...]


@dataclass(slots=True)
class _Partial:
    """Attention over some slots.

    Greatest score and sum of weights are [spans, kv_heads, rows, 1], the mix of values [.., head_dim].
    """

    peak: torch.Tensor
    total: torch.Tensor
    mixed: torch.Tensor

    def merge(self, later: _Partial) -> None:
        """Take in the partial of a later segment; where that is empty (peak -inf), the value stays what it was."""
        peak = torch.maximum(self.peak, later.peak)
        mine, others = (self.peak - peak).exp_(), (later.peak - peak).exp_()
        self.total.mul_(mine).add_(later.total.mul_(others))
        self.mixed.mul_(mine).add_(later.mixed.mul_(others))
        self.peak.copy_(peak)

    def rows(self, spans: int, first_row: int) -> _Partial:
        """A view of the leading spans' rows from `first_row` on."""
        parts = (self.peak, self.total, self.mixed)
        return _Partial(*(part[:spans, :, first_row:] for part in parts))


class TorchReference:
    """The reference backend. Errors: ValueError for a block size that is not a power of two up to SEGMENT."""

    numerics = f"reference-segment{SEGMENT}-float32"
    capturable = False  # it plans on the host

    def __init__(self, block_size: int) -> None:
        if block_size < 1 or SEGMENT % block_size:
            raise ValueError(f"block size must be a power of two up to {SEGMENT}, not {block_size}")
        self._block_size = block_size
        self._inputs: StepInputs | None = None
        self._groups: tuple[_Group, ...] = ()
        self._writer: SlotWriter | None = None

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._groups = ()  # planned when the number of query heads per K/V head is known
        self._writer = SlotWriter(inputs.slots, self._block_size)

    def write(self, planes: Planes, values: Sequence[torch.Tensor]) -> None:
        assert self._writer is not None, "prepare() comes first"
        self._writer.write(planes, values)

    def attend(self, planes: Planes, query: torch.Tensor) -> torch.Tensor:
        assert self._inputs is not None, "prepare() comes first"
        key_plane, value_plane = planes
        heads_per_kv = query.shape[1] // key_plane.shape[1]
        if not self._groups:
            self._groups = tuple(_plan(self._inputs, heads_per_kv, self._block_size))
        output = torch.empty_like(query)
        for group in self._groups:
            mixed = _attend_group(group, query, key_plane, value_plane)
            tokens = group.tokens.flatten()[group.kept]
            output[tokens] = mixed.flatten(0, 1)[group.kept].to(query.dtype)
        return output


def _attend_group(
    group: _Group, query: torch.Tensor, key_plane: torch.Tensor, value_plane: torch.Tensor
) -> torch.Tensor:
    """-> float32 [spans, width, num_heads, head_dim]."""
    kv_heads, head_dim = key_plane.shape[1], key_plane.shape[3]
    spans, width = group.tokens.shape
    rows = _as_rows(query[group.tokens].float() * head_dim**-0.5, kv_heads)
    state: _Partial | None = None
    for segment in group.segments:
        partial = _attend_segment(segment, rows, key_plane, value_plane)
        if state is None:
            state = partial  # segment 0: every span and every row
        else:
            state.rows(segment.spans, segment.first_row).merge(partial)
    assert state is not None
    heads_per_kv = query.shape[1] // kv_heads
    result = (state.mixed / state.total)[:, :, : width * heads_per_kv]
    by_token = result.reshape(spans, kv_heads, width, heads_per_kv, head_dim).transpose(1, 2)
    return by_token.reshape(spans, width, query.shape[1], head_dim)


def _attend_segment(
    segment: _Segment, rows: torch.Tensor, key_plane: torch.Tensor, value_plane: torch.Tensor
) -> _Partial:
    """rows float32 [spans, kv_heads, rows, head_dim] of the group -> the partial of this segment's spans and rows."""
    keys = _gather(key_plane, segment.blocks)
    values = _gather(value_plane, segment.blocks)
    if segment.written is not None:
        values = values.where(segment.written, 0.0)  # a weight of zero does not silence a NaN
    scores = rows[: segment.spans, :, segment.first_row :] @ keys.transpose(-1, -2)
    if segment.visible is not None:
        scores = scores.where(segment.visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    base = peak if segment.visible is None else peak.masked_fill(peak == -torch.inf, 0.0)
    weights = scores.sub_(base).clamp_min_(NEGLIGIBLE).exp_()
    if segment.visible is not None:
        weights.mul_(segment.visible)
    return _Partial(peak, weights.sum(-1, keepdim=True), weights @ values)


def _as_rows(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[spans, width, num_heads, head_dim] -> [spans, kv_heads, rows, head_dim], token-major, padded to whole tiles."""
    spans, width, num_heads, head_dim = query.shape
    by_kv_head = query.view(spans, width, kv_heads, num_heads // kv_heads, head_dim).transpose(1, 2).flatten(2, 3)
    return functional.pad(by_kv_head, (0, 0, 0, -by_kv_head.shape[2] % ROW_MULTIPLE))


def _gather(plane: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The blocks [spans, n] of a plane, in position order: float32 [spans, kv_heads, SEGMENT, head_dim]."""
    chosen = plane.index_select(0, blocks.flatten())  # a copy of whole blocks; plane[blocks] would go slot by slot
    found = chosen.view(*blocks.shape, *plane.shape[1:]).transpose(1, 2)  # [spans, kv_heads, n, block_size, head_dim]
    return torch.empty(found.shape, dtype=torch.float32, device=found.device).copy_(found).flatten(2, 3)


def _plan(inputs: StepInputs, heads_per_kv: int, block_size: int) -> Iterator[_Group]:
    """Sort the spans of a step into groups, and work out for each what all layers share."""
    starts, start = [], 0
    for length in inputs.q_len:
        starts.append(start)
        start += length
    members: dict[tuple[int, int], list[int]] = {}
    for span, length in enumerate(inputs.q_len):
        key = ((length - 1).bit_length(), -1) if length <= SHORT else (length, span)
        members.setdefault(key, []).append(span)
    for spans in members.values():
        spans.sort(key=lambda span: inputs.kv_len[span], reverse=True)
        yield _plan_group(inputs, spans, [starts[span] for span in spans], heads_per_kv, block_size)


def _plan_group(inputs: StepInputs, spans: list[int], starts: list[int], heads_per_kv: int, block_size: int) -> _Group:
    device = inputs.slots.device
    q_len, kv_len = [inputs.q_len[span] for span in spans], [inputs.kv_len[span] for span in spans]
    width = max(q_len)
    steps = torch.arange(width)
    last = torch.tensor(q_len)[:, None] - 1
    offsets = torch.minimum(steps, last)  # [spans, width]
    first_positions = torch.tensor(kv_len)[:, None] - 1 - last
    positions = functional.pad(
        (first_positions + offsets).repeat_interleave(heads_per_kv, dim=1), (0, -width * heads_per_kv % ROW_MULTIPLE)
    )
    per_segment = SEGMENT // block_size
    tables = inputs.block_tables[torch.tensor(spans, device=device)].long()
    tables = functional.pad(tables, (0, max(0, -(-kv_len[0] // SEGMENT) * per_segment - tables.shape[1])))
    segments = []
    for index, begin in enumerate(range(0, kv_len[0], SEGMENT)):
        blocks = tables[:, index * per_segment : (index + 1) * per_segment]
        segments.append(_plan_segment(begin, kv_len, positions, blocks, heads_per_kv, device))
    tokens = torch.tensor(starts)[:, None] + offsets
    kept = (steps <= last).flatten().nonzero().flatten()
    return _Group(tokens.to(device), kept.to(device), tuple(segments))


def _plan_segment(
    begin: int,
    kv_len: list[int],
    positions: torch.Tensor,
    blocks: torch.Tensor,
    heads_per_kv: int,
    device: torch.device,
) -> _Segment:
    """positions int64 [spans, rows] on CPU, the padding rows' being 0."""
    spans = sum(length > begin for length in kv_len)
    real = positions[:spans]
    # Rows ascend within a span, so those that see nothing of the segment come first; whole tiles of them are left out.
    unseen = int((real.amax(0) < begin).int().cummin(0).values.sum())
    first_row = unseen // ROW_MULTIPLE * ROW_MULTIPLE
    real = real[:, first_row:]
    slots = torch.arange(begin, begin + SEGMENT)
    visible = slots <= real[:, None, :, None]
    written = slots[:, None] < torch.tensor(kv_len[:spans])[:, None, None, None]
    return _Segment(
        spans=spans,
        first_row=first_row,
        blocks=blocks[:spans],
        visible=None if bool(visible.all()) else visible.to(device),
        written=None if bool(written.all()) else written.to(device),
    )
