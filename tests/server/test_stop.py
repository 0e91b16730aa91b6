from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.stop import StopMatcher

letters = st.text("ab😀\u0301", max_size=24)
stops_of_letters = st.lists(st.text("ab😀\u0301", min_size=1, max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What the matcher promises, by looking at the text one character at a time."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@settings(deadline=None)
@given(text=letters, stops=stops_of_letters, cuts=st.lists(st.integers(0, 100), max_size=8), include=st.booleans())
def test_the_pieces_joined_are_the_text_cut_at_its_first_stop(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    found = "".join(matcher.push(piece) for piece in split(text, cuts)) + matcher.finish()
    assert (found, matcher.matched) == cut_at_stop(text, stops, include)


@settings(deadline=None)
@given(text=letters, stops=stops_of_letters)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            return
        held = text[len(shown) : at + 1]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_is_held_only_until_it_is_certain() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.push(piece) for piece in ("a <", "b", "</", "s", ">c", "more")] == ["a ", "<b", "", "", "", ""]
    assert matcher.matched == "</s>"
    assert matcher.finish() == ""


def test_the_held_rest_comes_out_when_the_text_ends() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a sto") == "a "
    assert matcher.finish() == "sto"
    assert matcher.matched is None


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (["b", "abc"], "xabcd", "xa", "b"),  # "b" is complete first
        (["bc", "abc"], "xabcd", "x", "abc"),  # both are complete at "c": the longer
        (["aab"], "aaab", "a", "aab"),  # a false start overlaps the real one
        (["a", "a"], "ba", "b", "a"),
        ([""], "text", "text", None),
        ([], "text", "text", None),
    ],
)
def test_which_stop_is_the_first(stops: list[str], text: str, expected: str, matched: str | None) -> None:
    for pieces in ([text], list(text)):
        matcher = StopMatcher(stops)
        assert "".join(matcher.push(piece) for piece in pieces) + matcher.finish() == expected
        assert matcher.matched == matched


def test_the_stop_itself_can_be_included() -> None:
    matcher = StopMatcher(["END"], include=True)
    assert matcher.push("a E") + matcher.push("ND b") == "a END"
