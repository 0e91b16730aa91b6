"""How few tokens a text can have, known from its length alone, so that a hopelessly long one need not be encoded.

A token stands for so many bytes of the text at most: those of the longest one, as long as nothing on the way makes the
text shorter. What does (a normalizer that strips accents, a splitter that drops spaces, unknown characters that are
left out or fused, special tokens that swallow the spaces beside them) has no such bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_alphabet: Any = bytes_to_unicode  # transformers ships no types for it
ALPHABET = frozenset(_alphabet().values())
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
NFC_SHRINKS = 4  # times at most in UTF-8: three Hangul letters, or a kelvin sign, become a third of their bytes
KEEPING_SPLITS = {"ByteLevel", "Digits", "Metaspace"}


def most_bytes_per_token(backend: Any, added: Mapping[int, Any]) -> int | None:
    """The most bytes of a text's UTF-8 that one token of this tokenizer can stand for; None if there is no bound."""
    splits = list(steps_of(backend.pre_tokenizer, "pretokenizers"))
    shrinks = normalizers_shrink(list(steps_of(backend.normalizer, "normalizers")))
    swallows = any(token.lstrip or token.rstrip for token in added.values())
    if shrinks is None or swallows or not all(map(keeps_all, splits)):
        return None
    vocab: dict[str, int] = backend.get_vocab()
    model = backend.model
    if type(model).__name__ != "BPE":
        return None
    if any(split["type"] == "ByteLevel" for split in splits):
        if not vocab.keys() >= ALPHABET:
            return None
        plain = max(len(token) for token in vocab)  # a character for each byte
    elif model.byte_fallback and vocab.keys() >= BYTE_TOKENS:
        plain = max(len(token.encode()) for token in vocab)
    else:
        return None
    return shrinks * max(plain, *(len(token.content.encode()) for token in added.values()), 1)


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
