"""One draw from a row of logits: temperature, min_p, top_k, top_p, and noise that is a hash."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from model.sampler.rows import SampleRow, SamplingLike

Floats = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]


def draw(logits: Floats, peak: np.floating, row: SampleRow) -> int:
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
        ids = ids[np.sort(top_ids(weights[ids], params.top_k))]
    if params.top_p < 1.0:
        ids = ids[np.sort(_nucleus(weights[ids], params.top_p))]
    return ids


def _nucleus(weights: NDArray[np.float64], top_p: float) -> Ids:
    """The fewest most likely tokens whose share reaches `top_p` (Holtzman et al. 2020); at least one."""
    wanted = top_p * weights.sum()
    count = 64  # sorting a vocabulary is slow, and a nucleus is small: sort as many as it takes
    while True:
        ids = top_ids(weights, count)
        before = np.concatenate(([0.0], weights[ids].cumsum()[:-1]))
        kept = int(before.searchsorted(wanted, "left"))
        if kept < len(ids) or len(ids) == len(weights):
            return ids[: max(kept, 1)]
        count *= 8


def top_ids(values: Floats, count: int) -> Ids:
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
