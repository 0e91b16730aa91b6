"""A prompt as it is repeated: its text, and where in it each token begins."""

from __future__ import annotations

from typing import Any

import pytest

from server.echo import echo_of_ids
from server.text.encoding import EncodeJob
from server.tokenizer import Tokenizer
from tests.server.tiny_tokenizers import TEXT, byte_level, sentencepiece


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", [*TEXT, " a", "a  b", "中文字"])
def test_offsets_of_a_text(make: Any, text: str) -> None:
    tokenizer = Tokenizer(make())
    encoded = tokenizer.encode_job(EncodeJob(text, with_offsets=True))
    ids, offsets = encoded.ids, encoded.offsets
    assert ids == tokenizer.encode(text) and len(offsets) == len(ids)
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(text)
    for token_id, offset in zip(ids, offsets, strict=True):
        piece = tokenizer.token_text(token_id)
        if token_id not in tokenizer.special_token_ids and "\ufffd" not in piece:
            assert text[offset:].lstrip().startswith(piece.strip())


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", [*TEXT, "中文字"])
def test_ids_are_echoed_as_their_text(make: Any, text: str) -> None:
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode(text)
    echo = echo_of_ids(ids, tokenizer)
    assert (echo.text, echo.token_ids, len(echo.offsets)) == (text, tuple(ids), len(ids))
    assert echo.offsets[0] == 0 and list(echo.offsets) == sorted(echo.offsets)


def test_a_leading_bos_is_no_text_but_other_special_tokens_are() -> None:
    tokenizer = Tokenizer(byte_level())
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert bos is not None and eos is not None
    word = tokenizer.encode("the")
    echo = echo_of_ids([bos, *word, eos, bos], tokenizer)
    assert echo.text == "the<|end|><|begin|>"
    assert echo.offsets[0] == 0 and echo.offsets[-2:] == (3, 10)


def test_half_a_character_at_the_end_is_replaced() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = next(ids for ids in (tokenizer.encode("\u0800")[:-1],) if ids)
    assert echo_of_ids(ids, tokenizer).text == "\ufffd"
