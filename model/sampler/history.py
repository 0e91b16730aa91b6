"""What the sampler keeps of one generation from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from model.sampler.params import SamplingLike, is_penalized

Ids = NDArray[np.int64]


class History:
    """A generation's parameters and tokens, as arrays that a step can use as they are.

    seen   ids     | of the prompt, ascending | first seen in the output, in that order | (room) |
           counts  | in the output            | in the output                           |

    `num_output` tokens of the output were added so far. Only what a parameter reads is kept.
    """

    def __init__(self, params: SamplingLike, prompt_ids: Iterable[int] = ()) -> None:
        self.params = params
        self.is_penalized = is_penalized(params)
        self.num_output = 0
        self.bias_ids: Ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias_values = np.array([value for _, value in params.logit_bias], dtype=np.float64)
        allowed = params.allowed_token_ids
        self.allowed_ids: Ids | None = None if allowed is None else np.array(allowed, dtype=np.int64)
        self.changes_logits = bool(
            self.is_penalized or params.logit_bias or params.bad_words or params.allowed_token_ids is not None
        )
        longest = max((len(word) for word in params.bad_words), default=1)
        self._tail: deque[int] = deque(maxlen=longest - 1)
        prompt = prompt_ids if params.repetition_penalty != 1.0 else ()
        self._ids: Ids = np.unique(np.array(list(prompt), dtype=np.int64))
        self._counts: Ids = np.zeros(len(self._ids), dtype=np.int64)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the output."""
        for token in token_ids:
            self.num_output += 1
            self._tail.append(token)
            if self.is_penalized:
                self._count(token)

    def seen(self) -> tuple[Ids, Ids]:
        """The ids that a penalty may change, each once, and how often each is in the output."""
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def bad_ends(self) -> Iterator[int]:
        """The last token of each bad word whose other tokens the output ends with (vLLM's meaning: the prompt does not
        count, so a word that begins there is not seen)."""
        said = tuple(self._tail)
        for word in self.params.bad_words:
            before = len(word) - 1
            if before <= len(said) and said[len(said) - before :] == word[:-1]:
                yield word[-1]

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate((self._ids, np.empty(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.int64)))
        self._ids[place] = token
        self._counts[place] += 1
