"""Log-probabilities of tokens, those of the raw logits: before temperature, penalties, masks and filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.sampler.draw import top_ids
from model.sampler.rows import SampledToken


def score(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
    """The log-probability and rank of given tokens: row i of float32 logits [N, vocab_size] scores `token_ids[i]` and
    lists the `counts[i]` most likely ones."""
    values: NDArray[np.float32] = logits.detach().cpu().numpy()
    return [with_logprobs(row, *wanted) for row, *wanted in zip(values, token_ids, counts, strict=True)]


def with_logprobs(logits: NDArray[np.float32], chosen: int, count: int) -> SampledToken:
    wide = logits.astype(np.float64)
    peak = wide.max()
    with np.errstate(under="ignore"):
        log_total = peak + np.log(np.exp(wide - peak).sum())
    top = tuple((int(token), float(wide[token] - log_total)) for token in top_ids(wide, count))
    rank = 1 + int((logits > logits[chosen]).sum())
    return SampledToken(chosen, float(wide[chosen] - log_total), rank, top)
