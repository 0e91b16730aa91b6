"""What goes into the sampler, and what comes out, a row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.sampler.history import History

TokenMask = NDArray[np.uint32] | NDArray[np.int32]
"""One bit per token, 1 where it may be chosen: token t is bit t % 32 of word t // 32. The layout of xgrammar and
llguidance. [ceil(vocab_size / 32)]; the bits past the vocabulary mean nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """What one row of logits belongs to. `position` is the index, in prompt and output together, of the new token."""

    history: History
    position: int
    banned_ids: Sequence[int] = ()  # may not be chosen now, such as end-of-sequence before min_tokens
    mask: TokenMask | None = None  # what a grammar allows next; None for everything


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; the rest is set when log-probabilities were asked for. Rank 1 is the most likely token."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class SamplingFailure:
    """Stands in the place of a token that could not be chosen; only that row's request is affected.

    `is_broken` tells logits that are not finite, and so K/V that may not be, from a request that left itself nothing
    to choose from.
    """

    message: str
    is_broken: bool = False
