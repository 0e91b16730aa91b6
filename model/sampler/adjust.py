"""What changes a row's logits before anything is drawn: bans, biases and penalties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.sampler.history import History
from model.sampler.rows import SampleRow, TokenMask


def is_adjusted(row: SampleRow) -> bool:
    return bool(row.banned_ids) or row.mask is not None or row.history.changes_logits


def restrictions(row: SampleRow) -> list[str]:
    """What forbids tokens of a row, as those know it who asked for it."""
    params = row.history.params
    found = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": bool(row.banned_ids),
        "the grammar": row.mask is not None,
    }
    return [name for name, forbids in found.items() if forbids]


def adjust(changed: NDArray[np.float32], row: SampleRow) -> None:
    """All changes to a row of float32 logits [vocab_size], in place; -inf where a token may not be chosen.

    Biases come before penalties, as in vLLM: a repetition penalty scales the biased value. What may not be chosen is
    settled last, since nothing brings it back. A changed value is computed in float64 and rounded once.
    Raises ValueError for a mask of the wrong length.
    """
    history = row.history
    if len(history.bias_ids):
        changed[history.bias_ids] = changed[history.bias_ids].astype(np.float64) + history.bias_values
    if history.is_penalized:
        _penalize(changed, history)
    if row.mask is not None:
        np.copyto(changed, -np.inf, where=unpack(~row.mask, len(changed)))
    if history.allowed_ids is not None:
        kept = changed[history.allowed_ids]
        changed.fill(-np.inf)
        changed[history.allowed_ids] = kept
    if banned := [*history.bad_ends(), *row.banned_ids]:
        changed[banned] = -np.inf


def unpack(mask: TokenMask, vocab_size: int) -> NDArray[np.bool_]:
    """A packed mask as one bool per token. Raises ValueError when it is not as long as the vocabulary wants."""
    words = -(-vocab_size // 32)
    if mask.shape != (words,):
        raise ValueError(f"a mask over {vocab_size} tokens has {words} words, not {mask.shape}")
    octets = np.ascontiguousarray(mask).astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def _penalize(changed: NDArray[np.float32], history: History) -> None:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence (OpenAI) over the output only."""
    params = history.params
    ids, counts = history.seen()
    values = changed[ids].astype(np.float64)
    values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    changed[ids] = values
