"""One draw from a row of logits: temperature, min_p, top_k, top_p, and noise that is a hash.

Each filter sees only what the one before it left. Few tokens pass them, so those are found first, by comparing logits,
and only they are weighed in float64, ranked and summed. Where no filter is, or top_p alone, every token counts:
`Weights` then has float32 sums, right to a millionth.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from model.sampler.params import SamplingLike
from model.sampler.weights import BLOCK, Scaled, Weights

Values = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]

UNDERFLOW = 746.0
"""exp(-UNDERFLOW) is 0 in float64."""
LIKELY = 1e-3
"""A nucleus is first looked for among tokens at least this likely, relative to the best."""


def needs_weights(params: SamplingLike) -> bool:
    """Whether a draw needs the sum over the whole vocabulary."""
    return params.top_k <= 0 and params.min_p <= 0.0


def draw(row: Scaled, params: SamplingLike, position: int, weights: Weights | None) -> int:
    """One token by the inverse of the cumulative distribution over what the filters leave, in the order of ids.

    `weights` are the row's where `needs_weights`, else None.
    """
    uniform = _uniform(params.seed, params.choice, position)
    if weights is not None and params.top_p >= 1.0:
        return _draw_of_all(weights, uniform)
    if weights is None:
        ids = _above(row, params)
        values: Values = _weigh(row, row.logits[ids])
        wanted = params.top_p * float(values.sum())
    else:
        wanted = params.top_p * weights.total
        ids, values = _likely(row, weights, wanted, params.top_p)
    if params.top_p < 1.0:
        kept = largest(row.logits[ids], _nucleus_size(values, wanted))
        ids, values = ids[kept], values[kept]
    return int(ids[_invert(values, uniform)])


def largest(logits: NDArray[np.float32], count: int) -> Ids:
    """Ascending ids of the `count` greatest logits, lower ids among equals."""
    if count >= len(logits):
        return np.arange(len(logits))
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    ids = np.flatnonzero(logits >= _lower_bound(logits, count))
    values = logits[ids]
    cut = np.partition(values, -count)[-count]
    chosen = values > cut
    chosen[np.flatnonzero(values == cut)[: count - np.count_nonzero(chosen)]] = True
    kept: Ids = ids[chosen]
    return kept


def _lower_bound(logits: NDArray[np.float32], count: int) -> np.float32:
    """No more than the `count`-th greatest logit, and close to it: that many blocks have a token that great."""
    whole = len(logits) // BLOCK
    values = logits if count > whole else logits[: whole * BLOCK].reshape(whole, BLOCK).max(axis=1)
    return np.float32(np.partition(values, -count)[-count])


def _above(row: Scaled, params: SamplingLike) -> Ids:
    """Ascending ids of the tokens that min_p and top_k leave; those without any weight may be missing."""
    below = UNDERFLOW if params.min_p <= 0.0 else min(UNDERFLOW, -math.log(params.min_p) + 1e-3)
    bound = row.peak - np.float64(row.temperature) * below
    if 0 < params.top_k < len(row.logits):
        bound = max(bound, np.float64(_lower_bound(row.logits, params.top_k)))
    ids = np.flatnonzero(row.logits >= np.nextafter(np.float32(bound), np.float32(-np.inf)))
    values = row.logits[ids]
    if params.min_p > 0.0:
        kept = _weigh(row, values) >= params.min_p
        ids, values = ids[kept], values[kept]
    if 0 < params.top_k < len(ids):
        ids = ids[largest(values, params.top_k)]
    return ids


def _likely(row: Scaled, weights: Weights, wanted: float, top_p: float) -> tuple[Ids, Values]:
    """Tokens among which are all of the nucleus, by ascending ids, and their weights.

    What is less likely than `bound` is left out: all of that together has no more than the share 1 - top_p.
    """
    values = weights.blocks.reshape(-1)[: len(row.logits)]
    bound = 0.999 * (1.0 - top_p) * weights.total / len(values)
    if bound < LIKELY:
        ids = np.flatnonzero(values >= LIKELY)
        some = values[ids]
        if some.sum() > 1.0001 * wanted:
            return ids, some
    ids = np.flatnonzero(values >= bound)
    return ids, values[ids]


def _nucleus_size(values: Values, wanted: float) -> int:
    """The fewest of the greatest weights that reach `wanted` (Holtzman et al. 2020); at least one."""
    before = np.sort(values)[::-1].cumsum(dtype=np.float64)
    return 1 + min(int(before.searchsorted(wanted, "left")), len(values) - 1)


def _weigh(row: Scaled, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", under="ignore"):
        return np.exp((logits.astype(np.float64) - np.float64(row.peak)) / row.temperature)


def _draw_of_all(weights: Weights, uniform: float) -> int:
    """First the block, then the token in it, by what is left of the same number."""
    cumulative = weights.sums.cumsum()
    target = uniform * cumulative[-1]
    block = min(int(cumulative.searchsorted(target, "right")), int(cumulative.searchsorted(cumulative[-1], "left")))
    inside = (target - (cumulative[block - 1] if block else 0.0)) / weights.sums[block]
    return block * BLOCK + _invert(weights.blocks[block], inside)


def _invert(weights: Values, uniform: float) -> int:
    """The index at which the cumulative sum passes the share `uniform` of the whole."""
    cumulative = weights.cumsum(dtype=np.float64)
    drawn = cumulative.searchsorted(uniform * cumulative[-1], "right")
    # A product rounded up to the whole would point past the end: then it is the last token with any weight.
    return int(min(drawn, cumulative.searchsorted(cumulative[-1], "left")))


def _uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 bits, from a hash of its coordinates: no state, no order, no batch."""
    key = struct.pack("<QQQ", *(number % 2**64 for number in (seed, choice, position)))
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53
