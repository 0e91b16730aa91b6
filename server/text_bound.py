"""How few tokens a text can have, known from its length alone, so that a hopelessly long one need not be encoded.

A token stands for so many bytes of the text at most: those of the longest one, as long as nothing on the way makes the
text shorter. What does (a normalizer that strips accents, a splitter that drops spaces, unknown characters that are
left out or fused, special tokens that swallow the spaces beside them) has no such bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

IN_UTF8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
_alphabet: Any = bytes_to_unicode  # transformers ships no types for it
ALPHABET: dict[int, str] = _alphabet()
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in IN_UTF8)
NFC_SHRINKS = 4  # times at most in UTF-8: three Hangul letters, or a kelvin sign, become a third of their bytes
KEEPING_SPLITS = {"ByteLevel", "Digits", "Metaspace"}


@dataclass(frozen=True, slots=True)
class TextBound:
    """A token stands for `most_bytes` of a text at most. Bytes without a token, `left_out`, do not count."""

    most_bytes: int
    left_out: bytes = b""

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that the text can have; it may have more."""
        data = text.encode("utf-8", "surrogatepass").translate(None, self.left_out)
        return -(-len(data) // self.most_bytes)


def text_bound(backend: Any, added: Mapping[int, Any]) -> TextBound | None:
    """The bound of this tokenizer, whose `added` tokens are by id; None if there is none."""
    splits = list(steps_of(backend.pre_tokenizer, "pretokenizers"))
    shrinks = normalizers_shrink(list(steps_of(backend.normalizer, "normalizers")))
    swallows = any(token.lstrip or token.rstrip for token in added.values())
    if shrinks is None or swallows or not all(map(keeps_all, splits)) or type(backend.model).__name__ != "BPE":
        return None
    vocab: dict[str, int] = backend.get_vocab()
    left_out = b""
    if any(split["type"] == "ByteLevel" for split in splits):
        plain = max(len(token) for token in vocab)  # a character for each byte
        left_out = bytes(byte for byte in range(256) if ALPHABET[byte] not in vocab)
    elif backend.model.byte_fallback and vocab.keys() >= BYTE_TOKENS:
        plain = max(len(token.encode()) for token in vocab)
    else:
        return None
    if shrinks > 1 and any(byte in left_out for byte in IN_UTF8):
        return None  # what is left out was something else before it was normalized
    return TextBound(shrinks * max(plain, *(len(token.content.encode()) for token in added.values()), 1), left_out)


def steps_of(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The steps that a normalizer or pre-tokenizer of the tokenizers library is made of."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step[inner]
        else:
            yield step


def normalizers_shrink(steps: list[dict[str, Any]]) -> int | None:
    """By which factor at most these make a text shorter; None if that is not known."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if not pattern or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def keeps_all(split: dict[str, Any]) -> bool:
    if split["type"] in ("Split", "Punctuation"):
        return bool(split["behavior"] != "Removed")
    return split["type"] in KEEPING_SPLITS
