"""The fewest tokens a text can have: never more than it has, and close enough to spare the encoding of a long one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from server.text_bound import TextBound, text_bound
from server.tokenizer import TextTooLong, Tokenizer
from tests.server.test_tokenizer import default_path
from tests.server.tiny_tokenizers import byte_level, sentencepiece


def of(tokenizer: Any) -> TextBound | None:
    return text_bound(tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder)


def changed(**parts: Any) -> Any:
    """The byte-level tokenizer with other parts."""
    backend = Backend.from_str(byte_level().backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def composing() -> Any:
    return changed(normalizer=normalizers.NFC())


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.load(str(default_path()))


TINY = [byte_level, sentencepiece, composing]
odd = st.text(
    st.sampled_from("ab  \n\u0301e\u1100\u1161\u11a8\u212a中😀\x04\U00040000é<") | st.characters(codec="utf-8")
)


@pytest.mark.parametrize("make", TINY)
@settings(deadline=None, max_examples=100)
@given(text=st.lists(odd | st.sampled_from(["the quick brown fox", "<|begin|>", "▁▁▁", "      "])).map("".join))
def test_no_text_has_fewer(make: Any, text: str) -> None:
    tokenizer = make()
    bound = of(tokenizer)
    assert bound is not None
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@settings(deadline=None, max_examples=100)
@given(text=odd.map(lambda text: text * 9))
def test_no_text_has_fewer_in_the_default_model(smollm: Tokenizer, text: str) -> None:
    assert smollm._bound is not None and b"\x04" in smollm._bound.left_out
    assert smollm._bound.least_tokens(text) <= len(smollm.encode(text))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.StripAccents()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"normalizer": normalizers.Replace("abc", "a")},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": None, "decoder": decoders.ByteLevel()},
        {"model": models.WordLevel({"a": 0, "b": 1}, "a")},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_what_may_shorten_a_text_has_no_bound(parts: dict[str, Any]) -> None:
    assert of(changed(**parts)) is None


def test_tokens_that_swallow_spaces_have_no_bound() -> None:
    tokenizer = changed()
    tokenizer.add_tokens([AddedToken("<|pad|>", rstrip=True)])
    assert of(tokenizer) is None
    assert len(tokenizer.encode("<|pad|>" + " " * 10_000)) == 1


def test_megabytes_are_refused_before_they_are_encoded(smollm: Tokenizer) -> None:
    text = "1" * 4_000_000  # a token each; to encode them takes half a minute
    began = time.monotonic()
    with pytest.raises(TextTooLong) as refused:
        smollm.refuse_long(text, 8192)
    assert time.monotonic() - began < 2
    assert 8192 < refused.value.least <= len(text)
    smollm.refuse_long("the " * 100, 5)  # too near to tell


def test_half_a_surrogate_pair_is_no_matter(smollm: Tokenizer) -> None:
    assert smollm._bound is not None
    assert smollm._bound.least_tokens(json.loads(r'"\ud83d"') * 9) >= 1
