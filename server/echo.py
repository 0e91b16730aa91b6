"""A prompt that is repeated ahead of the text that continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.detokenizer import Detokenizer
from server.text.encoding import Encoded
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets` are where in `text` (characters) each of `token_ids` begins."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]


def echo_of_text(text: str, encoded: Encoded) -> Echo:
    """A prompt of text from where its first token begins that was kept."""
    start = encoded.offsets[0] if len(encoded.ids) < encoded.total else 0
    return Echo(text[start:], tuple(encoded.ids), tuple(offset - start for offset in encoded.offsets))


def echo_of_ids(token_ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """A prompt of ids as the text they stand for, special tokens included but for a leading BOS: that one is added to
    prompts of text as well, and is no part of their text."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets: list[int] = []
    text = ""
    for index, token_id in enumerate(token_ids):
        offsets.append(len(text))
        if index > 0 or token_id != tokenizer.bos_token_id:
            text += detokenizer.push((token_id,))
    return Echo(text + detokenizer.finish(), tuple(token_ids), tuple(offsets))
