from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from server.tokenizer import Tokenizer
from tests.server.tiny_tokenizers import byte_level, sentencepiece

BYTE_LEVEL = Tokenizer(byte_level())
SENTENCEPIECE = Tokenizer(sentencepiece())
unhurried = settings(deadline=None)  # tokenizers warm up, and machines are shared
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])

# Letters the tokenizers know, combining marks, scripts and emoji they must spell in bytes, and joiners between them.
text = st.text(
    st.one_of(
        st.sampled_from("the quick, 12\n\t é中字😀👩\u200d👧\u0301\u0300한"), st.characters(exclude_categories=["Cs"])
    )
)


def pieces(detokenizer: Detokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """Push `token_ids` in runs of the given sizes, then one by one, then finish."""
    found, at = [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        found.append(detokenizer.push(token_ids[at : at + size]))
        at += size
    return [*found, detokenizer.finish()]


@BOTH
@unhurried
@given(text=text, sizes=st.lists(st.integers(0, 5), max_size=10))
def test_pieces_joined_are_the_decoded_whole(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    found = pieces(Detokenizer(tokenizer), ids, sizes)
    whole = tokenizer.decode(ids)
    assert "".join(found) == whole == tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    # Never half a character: a replacement character comes out only where the whole text has one.
    assert sum(piece.count("\ufffd") for piece in found) == text.count("\ufffd")


@unhurried
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30), skip=st.booleans())
def test_random_bytes_are_replaced_as_transformers_does(ids: list[int], skip: bool) -> None:
    found = "".join(pieces(Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), ids, []))
    assert found == BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL._tokenizer.decode(ids, skip_special_tokens=skip)


@unhurried
@given(ids=st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=30), skip=st.booleans())
def test_random_byte_tokens_are_the_decoded_whole(ids: list[int], skip: bool) -> None:
    found = "".join(pieces(Detokenizer(SENTENCEPIECE, skip_special_tokens=skip), ids, []))
    assert found == SENTENCEPIECE.decode(ids, skip)


@unhurried
@given(ids=st.lists(st.sampled_from([0, 1, 2, *range(259, SENTENCEPIECE.vocab_size)]), max_size=30), skip=st.booleans())
def test_spaces_between_words_are_those_of_transformers(ids: list[int], skip: bool) -> None:
    assert SENTENCEPIECE.decode(ids, skip) == SENTENCEPIECE._tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_broken_byte_does_not_spoil_the_characters_around_it() -> None:
    """transformers replaces the whole run of byte tokens; a stream has shown the first character by then."""
    byte = lambda value: 3 + value  # noqa: E731
    ids = [byte(0xE4), byte(0xB8), byte(0xAD), byte(0xFF), byte(0xC3), byte(0xA9)]
    assert SENTENCEPIECE.decode(ids) == "中\ufffdé"
    assert SENTENCEPIECE._tokenizer.decode(ids) == "\ufffd" * 6


@BOTH
def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀y", add_special_tokens=False)
    found = pieces(Detokenizer(tokenizer), ids, [])
    assert [piece for piece in found if piece] == ["x", "😀", "y"]


@BOTH
def test_an_unfinished_character_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) == ""
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(ids)


def test_the_first_space_belongs_to_a_continued_text() -> None:
    ids = SENTENCEPIECE.encode("Paris is", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(SENTENCEPIECE), ids, [])) == "Paris is"
    assert "".join(pieces(Detokenizer(SENTENCEPIECE, after_prompt=True), ids, [])) == " Paris is"


def test_special_tokens_do_not_take_the_first_space() -> None:
    bos, *ids = SENTENCEPIECE.encode("Paris")
    assert pieces(Detokenizer(SENTENCEPIECE), [bos, *ids], [])[0] == ""
    assert "".join(pieces(Detokenizer(SENTENCEPIECE), [bos, *ids], [])) == "Paris"
    assert "".join(pieces(Detokenizer(SENTENCEPIECE, skip_special_tokens=False), [bos, *ids], [])) == "<s> Paris"


@settings(max_examples=20, deadline=None)
@given(st.integers(500, 1000))
def test_the_work_for_a_token_does_not_grow_with_the_text(count: int) -> None:
    """Counted in calls of the tokens' bytes, not in seconds: one a token, however many came before."""

    class Counting:
        strips_leading_space = False
        special_token_ids: frozenset[int] = frozenset()
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return b"\xff"  # the worst case for those who wait until a text no longer ends in U+FFFD

    counting = Counting()
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    assert all(detokenizer.push([0]) == "\ufffd" for _ in range(count))
    assert counting.calls == count
