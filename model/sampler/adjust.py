"""What changes a row's logits before anything is drawn: bans, biases and penalties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from model.sampler.rows import SampleRow, SamplingLike, TokenMask


def is_adjusted(row: SampleRow) -> bool:
    params = row.params
    return bool(
        row.banned_ids
        or row.mask is not None
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or is_penalized(params)
    )


def is_penalized(params: SamplingLike) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjusted(logits: NDArray[np.float32], row: SampleRow) -> NDArray[np.float32]:
    """A copy of float32 logits [vocab_size] with all changes, -inf where a token may not be chosen.

    Biases come before penalties, as in vLLM: a repetition penalty scales the biased value. What may not be chosen is
    settled last, since nothing brings it back. A changed value is computed in float64 and rounded once.
    Raises ValueError for a mask of the wrong length.
    """
    changed = logits.copy()
    if row.params.logit_bias:
        _add_bias(changed, row.params.logit_bias)
    if is_penalized(row.params):
        _penalize(changed, row)
    if row.mask is not None:
        changed[~unpack(row.mask, len(changed))] = -np.inf
    if row.params.allowed_token_ids is not None:
        allowed = np.asarray(row.params.allowed_token_ids, dtype=np.int64)
        kept = changed[allowed]
        changed.fill(-np.inf)
        changed[allowed] = kept
    banned = [*bad_ends(row.params.bad_words, row.output_ids), *row.banned_ids]
    changed[np.array(banned, dtype=np.int64)] = -np.inf
    return changed


def unpack(mask: TokenMask, vocab_size: int) -> NDArray[np.bool_]:
    """A packed mask as one bool per token. Raises ValueError when it is not as long as the vocabulary wants."""
    words = -(-vocab_size // 32)
    if mask.shape != (words,):
        raise ValueError(f"a mask over {vocab_size} tokens has {words} words, not {mask.shape}")
    octets = np.ascontiguousarray(mask).astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def bad_ends(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> Iterator[int]:
    """The last token of each bad word whose other tokens the output ends with (vLLM's meaning: the prompt does not
    count, so a word that begins there is not seen)."""
    for word in bad_words:
        before = len(word) - 1
        if before <= len(output_ids) and list(output_ids[len(output_ids) - before :]) == list(word[:-1]):
            yield word[-1]


def _add_bias(changed: NDArray[np.float32], bias: Sequence[tuple[int, float]]) -> None:
    ids = np.array([token for token, _ in bias], dtype=np.int64)
    changed[ids] = changed[ids].astype(np.float64) + [value for _, value in bias]


def _penalize(changed: NDArray[np.float32], row: SampleRow) -> None:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence (OpenAI) over the output only."""
    params = row.params
    output, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
    seen = np.union1d(np.asarray(row.prompt_ids, dtype=np.int64), output)
    values = changed[seen].astype(np.float64)
    values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values[np.searchsorted(seen, output)] -= params.frequency_penalty * counts + params.presence_penalty
    changed[seen] = values
