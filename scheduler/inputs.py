"""From a Batch to the flat tensors of one pass: the place where requests and blocks become numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from model.inputs import AdapterRows, StepInputs
from model.lora import LoraAdapter
from model.sampler import History, SampleRow, TokenMask
from scheduler.batch import Batch, Span
from scheduler.request import Request


def flatten(batch: Batch, block_size: int, device: torch.device) -> StepInputs:
    """The batch's spans, one after the other. Span rule 2 holds of `batch`, so every table is whole up to kv_len."""
    spans = batch.spans
    kv_len = tuple([span.end for span in spans])
    q_len = tuple([span.end - span.start for span in spans])
    tables = _tables(spans, block_size)
    counts = np.array(q_len)
    rows = np.repeat(np.arange(len(spans)), counts)
    # Position less flat index is the same throughout a span.
    positions = (np.array(kv_len) - counts.cumsum())[rows] + np.arange(batch.num_tokens)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepInputs(
        token_ids=_tensor(_tokens(spans), device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        q_len=q_len,
        kv_len=kv_len,
        block_tables=_tensor(tables, device),
        logit_rows=_tensor(_logit_rows(batch, q_len), device),
        adapters=_adapters(spans, device),
    )


def _tensor(numbers: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.to(device)


def sample_rows(
    requests: Iterable[Request], eos_token_ids: tuple[int, ...], masks: Mapping[str, TokenMask] = MappingProxyType({})
) -> list[SampleRow]:
    """What the sampler needs to know of each request whose next token is drawn. `masks` are by request id: what a
    grammar allows next."""
    return [_sample_row(request, eos_token_ids, masks.get(request.request_id)) for request in requests]


def _sample_row(request: Request, eos_token_ids: tuple[int, ...], mask: TokenMask | None) -> SampleRow:
    return SampleRow(_history(request), len(request.tokens), _banned(request, eos_token_ids, mask), mask)


def _history(request: Request) -> History:
    """What the sampler keeps of the request, up to its last token; a preemption takes no token back."""
    history = request.history
    if not isinstance(history, History):
        history = request.history = History(request.params, request.tokens[: request.prompt_len])
    history.add(request.tokens[request.prompt_len + history.num_output :])
    return history


def _tokens(spans: list[Span]) -> NDArray[np.int64]:
    tokens: list[int] = []
    for span in spans:
        tokens += span.request.tokens[span.start : span.end]
    return np.array(tokens, dtype=np.int64)


def _tables(spans: list[Span], block_size: int) -> NDArray[np.int32]:
    """[S, W] block ids in position order, as far as each span attends; 0 beyond."""
    widths = [-(-span.end // block_size) for span in spans]
    tables = np.zeros((len(spans), max(widths)), dtype=np.int32)
    for row, width, span in zip(tables, widths, spans, strict=True):
        row[:width] = span.request.table.ids[:width]
    return tables


def _logit_rows(batch: Batch, q_len: Sequence[int]) -> NDArray[np.int64]:
    """Flat indices: first of the prompt positions to score, then of the last token of each sampled request."""
    scored: list[int] = []
    last: dict[Request, int] = {}
    start = 0
    for span, count in zip(batch.spans, q_len, strict=True):
        scored += [start + position - span.start for position in span.request.unscored(span.start, span.end)]
        start += count
        last[span.request] = start - 1
    return np.array(scored + [last[request] for request in batch.sampled], dtype=np.int64)


def scored_tokens(batch: Batch) -> list[tuple[Request, int]]:
    """The prompt tokens that the first rows of logits score, as (request, index of the token), row by row."""
    return [
        (span.request, position + 1) for span in batch.spans for position in span.request.unscored(span.start, span.end)
    ]


def _adapters(spans: list[Span], device: torch.device) -> tuple[AdapterRows, ...]:
    """The flat indices of each adapter's spans; two versions of one adapter are two."""
    if all(span.request.adapter is None for span in spans):
        return ()
    rows: dict[LoraAdapter, list[NDArray[np.int64]]] = {}
    start = 0
    for span in spans:
        end = start + span.end - span.start
        if isinstance(adapter := span.request.adapter, LoraAdapter):
            rows.setdefault(adapter, []).append(np.arange(start, end))
        start = end
    return tuple(AdapterRows(_tensor(np.concatenate(parts), device), adapter) for adapter, parts in rows.items())


def _banned(request: Request, eos_token_ids: tuple[int, ...], mask: TokenMask | None) -> tuple[int, ...]:
    """Tokens that would end the request before its min_tokens; none, where a grammar allows no other: a text that is
    complete is followed by end-of-sequence tokens until there are enough."""
    if request.num_generated >= request.params.min_tokens:
        return ()
    eos = () if request.params.ignore_eos else eos_token_ids
    banned = (*eos, *request.params.stop_token_ids)
    return () if mask is not None and _leaves_nothing(mask, banned) else banned


def _leaves_nothing(mask: TokenMask, banned: Sequence[int]) -> bool:
    left = mask.view(np.uint32).copy()
    for token in banned:
        left[token // 32] &= ~np.uint32(1 << token % 32)
    return not left.any()
