"""Choosing the next token of each row from its logits.

    logits -> banned tokens out -> penalties -> temperature -> min_p -> top_k -> top_p -> one draw

in the order and with the meaning that vLLM gives them. Reported log-probabilities are those of the raw logits. A row's
token depends on its own logits, parameters and history: noise is a hash of (seed, choice, position), so the same seed
gives the same text in any batch, after a preemption and in another process.

Everything is numpy on the host: an argmax over 16 rows takes 0.05 ms here, against 0.34 ms in torch on CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures under this are taken for 0, as in vLLM: the quotient would overflow long before it mattered."""


class SamplingLike(Protocol):
    """What the sampler reads of a request's sampling parameters."""

    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logprobs(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits belongs to. `position` is the index, in prompt and output together, of the new token."""

    params: SamplingLike
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: Sequence[int] = ()  # may not be chosen now, such as end-of-sequence before min_tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; the rest is set when log-probabilities were asked for. Rank 1 is the most likely token."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class SamplingFailure:
    """Stands in the place of a token that could not be chosen; only that row's request is affected."""

    message: str


class Sampler:
    """Stateless but for the size of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | SamplingFailure]:
        """logits float32 [N, vocab_size], on any device, one row of them per SampleRow; they are not modified.

        Errors: ValueError when the shapes do not fit. A row without a finite maximum (NaN from a broken network, or
        every token banned) gives a SamplingFailure in its place.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"{len(rows)} rows over {self._vocab_size} tokens do not fit logits {tuple(logits.shape)}")
        if not rows:
            return []
        values: NDArray[np.float32] = logits.detach().cpu().numpy()
        best = values.argmax(axis=1)  # the first of equals; the first NaN where there is one
        return [_sample_row(values[index], int(best[index]), row) for index, row in enumerate(rows)]


def score(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
    """The log-probability and rank of given tokens: row i of float32 logits [N, vocab_size] scores `token_ids[i]` and
    lists the `counts[i]` most likely ones."""
    values: NDArray[np.float32] = logits.detach().cpu().numpy()
    return [_with_logprobs(row, *wanted) for row, *wanted in zip(values, token_ids, counts, strict=True)]


def _sample_row(logits: NDArray[np.float32], best: int, row: SampleRow) -> SampledToken | SamplingFailure:
    if not np.isfinite(logits[best]):
        return SamplingFailure(f"the network's logits at position {row.position} are not finite")
    chosen = best
    if _is_changed(row):
        changed = _with_penalties(logits, row)
        chosen = int(changed.argmax())
        if not np.isfinite(changed[chosen]):
            return SamplingFailure(f"no token may be chosen at position {row.position}")
        if row.params.temperature >= GREEDY_BELOW:
            chosen = _draw(changed, changed[chosen], row)
    elif row.params.temperature >= GREEDY_BELOW:
        chosen = _draw(logits, logits[best], row)
    if row.params.logprobs is None:
        return SampledToken(chosen)
    return _with_logprobs(logits, chosen, row.params.logprobs)


def _is_changed(row: SampleRow) -> bool:
    params = row.params
    return bool(row.banned_ids) or (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def _with_penalties(logits: NDArray[np.float32], row: SampleRow) -> NDArray[np.float64]:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence (OpenAI) over the output only."""
    params = row.params
    changed = logits.astype(np.float64)
    output, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(np.asarray(row.prompt_ids, dtype=np.int64), output)
        penalty = params.repetition_penalty
        changed[seen] = np.where(changed[seen] > 0, changed[seen] / penalty, changed[seen] * penalty)
    changed[output] -= params.frequency_penalty * counts + params.presence_penalty
    changed[np.asarray(row.banned_ids, dtype=np.int64)] = -np.inf
    return changed


def _draw(logits: Floats, peak: np.floating, row: SampleRow) -> int:
    """One token by the inverse of the cumulative distribution over what the filters leave, in the order of ids."""
    params = row.params
    with np.errstate(over="ignore", under="ignore"):
        scores = (logits.astype(np.float64) - np.float64(peak)) / params.temperature  # the best is 0
        weights = np.exp(scores)  # the best is 1
    ids = _filtered(weights, params)
    cumulative = (weights if ids is None else weights[ids]).cumsum()
    drawn = cumulative.searchsorted(_uniform(params.seed, params.choice, row.position) * cumulative[-1], "right")
    # A product rounded up to the whole would point past the end: then it is the last token with any weight.
    drawn = min(drawn, cumulative.searchsorted(cumulative[-1], "left"))
    return int(drawn if ids is None else ids[drawn])


def _filtered(weights: NDArray[np.float64], params: SamplingLike) -> Ids | None:
    """Ascending ids of the tokens that min_p, top_k and top_p leave, in that order; None for all.

    Each filter sees only what the one before it left: fewer tokens to sort, and shares that add up to one.
    """
    if params.min_p <= 0.0 and params.top_k <= 0 and params.top_p >= 1.0:
        return None
    ids = np.flatnonzero(weights >= params.min_p if params.min_p > 0.0 else weights)  # relative to the best, which is 1
    if 0 < params.top_k < len(ids):
        ids = ids[np.sort(_top_ids(weights[ids], params.top_k))]
    if params.top_p < 1.0:
        ids = ids[np.sort(_nucleus(weights[ids], params.top_p))]
    return ids


def _nucleus(weights: NDArray[np.float64], top_p: float) -> Ids:
    """The fewest most likely tokens whose share reaches `top_p` (Holtzman et al. 2020); at least one."""
    wanted = top_p * weights.sum()
    count = 64  # sorting a vocabulary is slow, and a nucleus is small: sort as many as it takes
    while True:
        ids = _top_ids(weights, count)
        before = np.concatenate(([0.0], weights[ids].cumsum()[:-1]))
        kept = int(before.searchsorted(wanted, "left"))
        if kept < len(ids) or len(ids) == len(weights):
            return ids[: max(kept, 1)]
        count *= 8


def _top_ids(values: Floats, count: int) -> Ids:
    """The ids of the `count` greatest values, best first, lower ids first among equals."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    if count >= len(values):
        candidates = np.arange(len(values))
    else:
        candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = np.argsort(-values[candidates], kind="stable")  # candidates ascend, so equals stay in the order of ids
    return candidates[order[:count]]


def _uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 bits, from a hash of its coordinates: no state, no order, no batch."""
    key = struct.pack("<QQQ", *(number % 2**64 for number in (seed, choice, position)))
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _with_logprobs(logits: NDArray[np.float32], chosen: int, count: int) -> SampledToken:
    wide = logits.astype(np.float64)
    peak = wide.max()
    with np.errstate(under="ignore"):
        log_total = peak + np.log(np.exp(wide - peak).sum())
    top = tuple((int(token), float(wide[token] - log_total)) for token in _top_ids(wide, count))
    rank = 1 + int((logits > logits[chosen]).sum())
    return SampledToken(chosen, float(wide[chosen] - log_total), rank, top)
