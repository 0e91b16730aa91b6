"""Vocabulary: the text of one model's tokens, which is all the text that an engine knows.

llguidance reads tokenizers by itself as well, but takes every added token that is spelled `<...>` for a special one, so
that no text could hold it: not the `<tool_call>` of Qwen, nor the `<think>` of many others. Here the server says which
tokens are text and which are not, by the same rule that its detokenizer follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
import tokenizers

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's tokens, as plain data.

    `tokens[id]` is what the token adds to a text: bytes, which may be part of a character; empty for an id without a
    token. The tokens in `special` are never text, and theirs is a name. `tokenizer` is JSON as the tokenizers library
    writes it: how the model was taught to cut text into tokens.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    tokenizer: str


class Speller:
    """A vocabulary in the shape that llguidance.TokenizerWrapper takes: the tokens, and a call that spells a text.

    A text that a grammar forces is spelled as the model was taught to, but only by tokens that are text and whose bytes
    are exactly the text's: a normalizer may change it, and a special token may be spelled in it. Such a text is spelled
    by the longest tokens that match.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's, whose embedding may have more rows than there are tokens, or fewer. Raises what
        the tokenizers library does when it cannot read the tokenizer."""
        missing = vocab_size - len(vocabulary.tokens)
        self.tokens = (*vocabulary.tokens[:vocab_size], *[b""] * missing)
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(
            token for token in {*vocabulary.special, *eos_token_ids} if token < vocab_size and self.tokens[token]
        )
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizers.Tokenizer.from_str(continuing(vocabulary.tokenizer))

    def __call__(self, text: str) -> list[int]:
        """Any thread."""
        # As a batch of one: `encode` keeps the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        wanted = text.encode()
        return encoding.ids if b"".join(self._texts(encoding.ids)) == wanted else self._longest(wanted)

    def token_of(self, text: str) -> int | None:
        """The one token that is this text."""
        return self._by_text.get(text.encode())

    def _texts(self, ids: Sequence[int]) -> Iterator[bytes]:
        for token in ids:
            yield b"" if token >= len(self.tokens) or token in self._special else self.tokens[token]

    def _longest(self, text: bytes) -> list[int]:
        """What no token begins with is left out, which llguidance reports as a grammar that cannot be followed."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest_token), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_text), None)
            if end is not None:
                ids.append(self._by_text[text[start:end]])
            start = end or start + 1
        return ids

    @cached_property
    def _by_text(self) -> dict[bytes, int]:
        tokens = enumerate(self.tokens)
        return {text: token for token, text in tokens if text and token not in self._special}

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._by_text), default=0)


def continuing(tokenizer: str) -> str:
    """The tokenizer without what puts a space before a text: forced text continues another."""
    description: Json = orjson.loads(tokenizer)
    steps = {name: without_space(description.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return orjson.dumps(description | steps).decode()


def without_space(step: Any) -> Any:
    """A step of a normalizer or pre-tokenizer that puts no space before a text; None for one that does nothing else."""
    if not isinstance(step, dict):
        return step
    match step.get("type"):
        case "Prepend":
            return None
        case "Metaspace":
            return {key: value for key, value in step.items() if key != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        case "ByteLevel":
            return step | {"add_prefix_space": False}
        case "Sequence":
            parts = {
                name: list(map(without_space, step[name])) for name in ("normalizers", "pretokenizers") if name in step
            }
            return step | {name: [part for part in made if part is not None] for name, made in parts.items()}
    return step
