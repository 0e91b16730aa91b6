"""exp of whole rows of logits, and sums of it: what most of a draw's time goes into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Tokens that are summed together before sums are added up: a float32 sum over so few is right to seven digits."""

ROWS = 16
"""Rows that share a call: 3 MB of them for a vocabulary of 49,152."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Whose weights are wanted: exp((logits - peak) / temperature), so that the best token's is 1."""

    logits: NDArray[np.float32]  # [vocab_size]
    peak: np.float32  # their maximum, finite
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """float32 weights of a row in blocks [B, BLOCK], zeros past the vocabulary, and each block's sum."""

    blocks: NDArray[np.float32]
    sums: NDArray[np.float64]  # [B]

    @property
    def total(self) -> float:
        return float(self.sums.sum())


class Exponentials:
    """A buffer for a few rows, kept: fresh pages would cost as much as the work.

    The exponential is torch's: it takes half of numpy's time here, and threads share it. A row's bits depend on nothing
    but the row.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // BLOCK)
        self._buffer = np.empty((ROWS, self._num_blocks * BLOCK), dtype=np.float32)

    def weigh(self, rows: Sequence[Scaled]) -> Iterator[Weights]:
        """Views of the buffer, in the order of rows: each is true until the next is asked for."""
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            buffer = self._buffer[: len(some)]
            for target, row in zip(buffer, some, strict=True):
                self._scale(row, target)
            torch.from_numpy(buffer).exp_()
            yield from map(self._weights, buffer)

    def _scale(self, row: Scaled, target: NDArray[np.float32]) -> None:
        target[self._vocab_size :] = -np.inf
        scores = target[: self._vocab_size]
        with np.errstate(over="ignore"):  # to -inf, which weighs nothing
            np.subtract(row.logits, row.peak, out=scores)
            if row.temperature != 1.0:
                np.divide(scores, np.float32(row.temperature), out=scores)

    def _weights(self, row: NDArray[np.float32]) -> Weights:
        blocks = row.reshape(self._num_blocks, BLOCK)
        return Weights(blocks, blocks.sum(axis=1).astype(np.float64))
