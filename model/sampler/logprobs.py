"""Log-probabilities of tokens, those of the raw logits: before temperature, penalties, masks and filters."""

from __future__ import annotations

import math

import numpy as np

from model.sampler.draw import largest
from model.sampler.rows import SampledToken
from model.sampler.weights import Scaled, Weights


def with_logprobs(row: Scaled, weights: Weights, token_id: int, count: int) -> SampledToken:
    """A chosen token with its log-probability in a row at temperature 1, and the `count` most likely ones, best first,
    lower ids first among equals."""
    logits = row.logits
    log_total = float(row.peak) + math.log(weights.total)
    ids = largest(logits, count)
    top = ids[np.argsort(-logits[ids], kind="stable")]
    listed = zip(top.tolist(), (logits[top].astype(np.float64) - log_total).tolist(), strict=True)
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    return SampledToken(token_id, float(logits[token_id]) - log_total, rank, tuple(listed))
