"""Sampler: a token for each row of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.sampler.adjust import adjust, is_adjusted, restrictions
from model.sampler.draw import draw, needs_weights
from model.sampler.logprobs import with_logprobs
from model.sampler.rows import SampledToken, SampleRow, SamplingFailure
from model.sampler.weights import Exponentials, Scaled

GREEDY_BELOW = 1e-5
"""Temperatures under this are taken for 0, as in vLLM: the quotient would overflow long before it mattered."""


class Sampler:
    """Stateless but for buffers: what one generation has said so far is in its History."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._exponentials = Exponentials(vocab_size)
        self._changed = np.empty((0, vocab_size), dtype=np.float32)  # grows to the most rows of a step

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | SamplingFailure]:
        """logits float32 [N, vocab_size], on any device, one row of them per SampleRow; they are not modified.

        Errors: ValueError when the shapes do not fit. A row without a finite maximum (NaN from a broken network), or
        with every token banned, gives a SamplingFailure in its place.
        """
        if logits.device.type != "cpu" and logits.shape == (len(rows), self._vocab_size):
            return self._sample_on_device(logits, rows)
        return self._sample_on_host(logits, rows)

    def _sample_on_device(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> list[SampledToken | SamplingFailure]:
        """Greedy rows are settled where their logits lie; only the logits of the others travel to the host."""
        others = [index for index, row in enumerate(rows) if not _is_greedy(row)]
        sampled = dict(zip(others, self._sample_on_host(logits[others], [rows[i] for i in others]), strict=True))
        if len(others) < len(rows):
            peaks, best = logits.max(dim=1)
            found: list[list[float]] = torch.stack((best.double(), peaks.double())).tolist()
            for index, (token_id, peak) in enumerate(zip(*found, strict=True)):
                if index not in sampled:
                    finite = math.isfinite(peak)
                    sampled[index] = SampledToken(int(token_id)) if finite else _broken(rows[index].position)
        return [sampled[index] for index in range(len(rows))]

    def _sample_on_host(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | SamplingFailure]:
        values = self._values(logits, len(rows))
        if not rows:
            return []
        best: list[int] = values.argmax(axis=1).tolist()  # the first of equals; the first NaN where there is one
        choices = [_Choice(*each) for each in zip(rows, values, best, strict=True)]
        self._adjust([choice for choice in choices if choice.failure is None and is_adjusted(choice.row)])
        going = [choice for choice in choices if choice.failure is None]
        self._draw([choice for choice in going if choice.params.temperature >= GREEDY_BELOW])
        self._add_logprobs([choice for choice in going if choice.params.logprobs is not None])
        return [choice.failure or choice.scored or SampledToken(choice.token_id) for choice in choices]

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
        """The log-probability and rank of given tokens: row i of float32 logits [N, vocab_size] scores `token_ids[i]`
        and lists the `counts[i]` most likely ones."""
        if not token_ids:
            return []
        rows = [Scaled(row, row.max()) for row in self._values(logits, len(token_ids))]
        weighed = zip(rows, self._exponentials.weigh(rows), token_ids, counts, strict=True)
        return [with_logprobs(row, weights, *wanted) for row, weights, *wanted in weighed]

    def _values(self, logits: torch.Tensor, count: int) -> NDArray[np.float32]:
        if logits.shape != (count, self._vocab_size):
            raise ValueError(f"{count} rows over {self._vocab_size} tokens do not fit logits {tuple(logits.shape)}")
        values: NDArray[np.float32] = logits.detach().cpu().numpy()
        return values

    def _adjust(self, choices: Sequence[_Choice]) -> None:
        if len(choices) > len(self._changed):  # kept: a row is so long that fresh memory costs more than the work
            self._changed = np.empty((len(choices), self._vocab_size), dtype=np.float32)
        for choice, changed in zip(choices, self._changed, strict=False):
            changed[:] = choice.logits
            choice.adjust(changed)

    def _draw(self, choices: Sequence[_Choice]) -> None:
        """Rows that need weights get them together, so that threads share the work; each is then drawn alone."""
        heavy = [choice for choice in choices if needs_weights(choice.params)]
        for choice, weights in zip(heavy, self._exponentials.weigh([choice.scaled for choice in heavy]), strict=True):
            choice.token_id = draw(choice.scaled, choice.params, choice.row.position, weights)
        for choice in choices:
            if not needs_weights(choice.params):
                choice.token_id = draw(choice.scaled, choice.params, choice.row.position, None)

    def _add_logprobs(self, choices: Sequence[_Choice]) -> None:
        rows = [Scaled(choice.logits, choice.logits[choice.best]) for choice in choices]
        for choice, row, weights in zip(choices, rows, self._exponentials.weigh(rows), strict=True):
            choice.scored = with_logprobs(row, weights, choice.token_id, choice.params.logprobs or 0)


def _is_greedy(row: SampleRow) -> bool:
    """Whether the row's token is the most likely one, and nothing else is asked."""
    params = row.history.params
    return params.temperature < GREEDY_BELOW and params.logprobs is None and not is_adjusted(row)


def _broken(position: int) -> SamplingFailure:
    return SamplingFailure(f"the network's logits at position {position} are not finite", True)


class _Choice:
    """A row on its way to a token: its logits as they came and as they were changed, and what was chosen so far."""

    __slots__ = ("best", "changed", "failure", "logits", "params", "row", "scored", "token_id")

    def __init__(self, row: SampleRow, logits: NDArray[np.float32], best: int) -> None:
        self.row = row
        self.params = row.history.params
        self.logits = self.changed = logits
        self.best = self.token_id = best
        self.failure: SamplingFailure | None = None
        self.scored: SampledToken | None = None
        if not np.isfinite(logits[best]):
            self.failure = _broken(row.position)

    def adjust(self, changed: NDArray[np.float32]) -> None:
        """Choose by a copy of the logits, which is changed as the row says."""
        adjust(changed, self.row)
        self.changed = changed
        self.token_id = int(changed.argmax())
        if not np.isfinite(changed[self.token_id]):
            left = f"no token to choose at position {self.row.position}"
            self.failure = SamplingFailure(f"{' and '.join(restrictions(self.row))} leave {left}")

    @property
    def scaled(self) -> Scaled:
        """Before anything is drawn, the token chosen is the best."""
        return Scaled(self.changed, self.changed[self.token_id], self.params.temperature)
