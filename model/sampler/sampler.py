"""Sampler: a token for each row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.sampler.adjust import adjusted, is_adjusted
from model.sampler.draw import draw
from model.sampler.logprobs import with_logprobs
from model.sampler.rows import SampledToken, SampleRow, SamplingFailure

GREEDY_BELOW = 1e-5
"""Temperatures under this are taken for 0, as in vLLM: the quotient would overflow long before it mattered."""


class Sampler:
    """Stateless but for the size of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | SamplingFailure]:
        """logits float32 [N, vocab_size], on any device, one row of them per SampleRow; they are not modified.

        Errors: ValueError when the shapes do not fit. A row without a finite maximum (NaN from a broken network), or
        with every token banned, gives a SamplingFailure in its place.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"{len(rows)} rows over {self._vocab_size} tokens do not fit logits {tuple(logits.shape)}")
        if not rows:
            return []
        values: NDArray[np.float32] = logits.detach().cpu().numpy()
        best = values.argmax(axis=1)  # the first of equals; the first NaN where there is one
        return [_sample_row(values[index], int(best[index]), row) for index, row in enumerate(rows)]


def _sample_row(logits: NDArray[np.float32], best: int, row: SampleRow) -> SampledToken | SamplingFailure:
    if not np.isfinite(logits[best]):
        return SamplingFailure(f"the network's logits at position {row.position} are not finite", is_broken=True)
    changed, chosen = logits, best
    if is_adjusted(row):
        changed = adjusted(logits, row)
        chosen = int(changed.argmax())
        if not np.isfinite(changed[chosen]):
            return SamplingFailure(f"what the request allows leaves no token to choose at position {row.position}")
    if row.params.temperature >= GREEDY_BELOW:
        chosen = draw(changed, changed[chosen], row)
    if row.params.logprobs is None:
        return SampledToken(chosen)
    return with_logprobs(logits, chosen, row.params.logprobs)
