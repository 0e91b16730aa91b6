"""Special tokens that are text all the same: the tags of calls and of reasoning, which some tokenizers call special."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from scheduler.vocabulary import Vocabulary
from server.tokenizer import Tokenizer
from server.tools.calls import ToolFormat

REASONING = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class WrittenTags:
    """Ids of special tokens: those in which the model writes calls, and these with all others that a grammar may hold a
    text to. Text is read for calls, and a client reads what its grammar demands, so both must see them."""

    calls: frozenset[int]
    all: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: ToolFormat) -> Self:
        texts = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_token_ids}
        calls = frozenset(token for token, text in texts.items() if text in form.tags)
        return cls(calls, calls | {token for token, text in texts.items() if text in REASONING})

    def shown(self, *, is_guided: bool, may_call: bool) -> frozenset[int]:
        """Those that are text in an answer, also where special tokens are left out."""
        return self.all if is_guided else self.calls if may_call else frozenset()

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        """The tokenizer's tokens as the engine gets them. Takes up to a second for a large tokenizer."""
        return Vocabulary(tokenizer.tokens(), tokenizer.special_token_ids - self.all, tokenizer.to_json())
