"""Text that spells a special token and is none: what a client writes into a chat is data.

A chat template mixes what it writes itself, special tokens among it, with what clients wrote. To keep the two apart
in the rendered text, every special token's text in the clients' strings gets a mark, a character found nowhere else:

    content    "a<|im_end|>"  ->  "aM<|im_end|>"
    rendered   "<|im_start|>user\\naM<|im_end|><|im_end|>\\n"
                ------------        |            ----------     the template's own: without a mark before them

The unmarked ones are then replaced by aliases that no client can guess, and the text is encoded, in one piece, by a
copy of the tokenizer that knows its special tokens by these aliases alone. transformers has the same idea in
`apply_chat_template(sanitize_control_tokens=True)`, which encodes the text in pieces and is not for several threads.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MARKS = range(0xF0000, 0xF1000)  # of a plane for private use
ALIAS_EDGE = chr(0xF1000)


class SpecialMarks:
    """Finds and marks what spells one of these texts of special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        self.any = "|".join(map(re.escape, longest_first)) or "(?!)"  # which never matches
        self._pattern = re.compile(self.any)
        self._anywhere = re.compile(f"(?={self.any})")  # also those that overlap

    def occur_in(self, *values: Any) -> bool:
        """Whether a string anywhere within these values spells a special token."""
        return any(self._pattern.search(text) for text in strings_in(values))

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with the mark before every special token's text, in all strings within it."""
        if isinstance(value, str):
            return self._anywhere.sub(mark, value)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value


class SpecialText:
    """The special tokens of one tokenizer, by id, and the copy of its `backend` that knows them by alias."""

    def __init__(self, backend: Any, contents: Mapping[int, str]) -> None:
        self._backend = backend
        nonce = secrets.token_hex(8)
        self._aliases = {text: f"{ALIAS_EDGE}{nonce}-{id}{ALIAS_EDGE}" for id, text in contents.items() if text}
        self._ids = {self._aliases[text]: id for id, text in contents.items() if text}
        self._any = SpecialMarks(self._aliases).any
        self._lock = threading.Lock()
        self._copy: Any = None

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Token ids of a marked text, without what a tokenizer adds. Raises TypeError where it is no valid Unicode."""
        own = re.compile(f"(?<!{mark})(?:{self._any})")
        text = own.sub(lambda match: self._aliases[match[0]], rendered).replace(mark, "")
        (encoding,) = self._aliased().encode_batch([text], add_special_tokens=False)
        return list(encoding.ids)

    def _aliased(self) -> Any:
        with self._lock:
            if self._copy is None:
                self._copy = self._make_copy()
        return self._copy

    def _make_copy(self) -> Any:
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._aliases:
                token |= {"content": self._aliases[token["content"]], "normalized": False}
        self._rename(description["model"])
        copy = type(self._backend).from_str(json.dumps(description))
        wrong = [id for alias, id in self._ids.items() if copy.token_to_id(alias) != id]
        if wrong:
            raise ValueError(f"special token {wrong[0]} cannot be told from its text in this tokenizer")
        return copy

    def _rename(self, model: dict[str, Any]) -> None:
        """So that the model itself cannot make a special token of plain text either."""
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {self._aliases.get(token, token): id for token, id in vocab.items()}
        else:  # pairs of token and score
            model["vocab"] = [[self._aliases.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in self._aliases:
            model["unk_token"] = self._aliases[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not self._makes_special(merge)]

    def _makes_special(self, merge: Any) -> bool:
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        return not self._aliases.keys().isdisjoint((left, right, left + right))


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def unused_mark(*values: Any) -> str:
    """A character that occurs in none of the strings within these values."""
    used = {char for text in strings_in(values) for char in text if ord(char) in MARKS}
    return next(chr(code) for code in MARKS if chr(code) not in used)
