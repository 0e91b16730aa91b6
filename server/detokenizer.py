"""Token ids to text while they arrive, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice, piece by piece; the pieces joined are `Tokenizer.decode` of all its tokens.

    Each token is turned into its bytes and pushed through an incremental UTF-8 decoder, so the cost of a token does
    not grow with the text, and a byte sequence is replaced by U+FFFD as soon as no continuation can save it.

    With `after_prompt` the tokens continue a text: a SentencePiece space before the first word belongs to the output
    ("The capital is" + " Paris"). Without it they are a text of their own, whose first space is dropped.

    `skip_special_tokens` leaves special tokens out, except those in `shown`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        after_prompt: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
        self._strip_space = tokenizer.strips_leading_space and not after_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made final; empty while they end within a character."""
        data = b"".join(self._tokenizer.token_bytes(id) for id in token_ids if id not in self._skipped)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held: U+FFFD if the last character was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
