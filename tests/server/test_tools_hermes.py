"""Reading calls as Hermes writes them: whole, and in whatever pieces they come."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from server.tools.body import Tool
from server.tools.calls import Call, collect
from server.tools.hermes import CLOSE, OPEN, Hermes
from tests.server.tiny_tokenizers import byte_level

Read = tuple[str, list[tuple[str, str]]]

WEATHER = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Oslo"}}}}\n{CLOSE}'
TIME = f'{OPEN}{{"name":"time","arguments":{{}}}}{CLOSE}'

PIECES = st.sampled_from(
    ['"', "\\", "{", "}", "[", ",", ":", " ", "\n", "a", "é", "😀", "<", OPEN, CLOSE, "<tool_", "call>", "</tool"]
    + ['{"name": "f", "arguments": ', '{"name": "f"', '"a": 1', "true", "}}", WEATHER, TIME]
)


def read(pieces: list[str], *, eager: bool) -> Read:
    parser = Hermes().parser(eager=eager)
    content, calls = "", list[Call]()
    for found in [*map(parser.push, pieces), parser.finish()]:
        content += found.content
        collect(calls, found.calls)
    assert len({call.id for call in calls}) == len(calls) and all(
        re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls
    )
    return content, [(call.name, call.arguments) for call in calls]


def read_all(text: str) -> Read:
    """Whole, when that is the same in both ways of reading."""
    found = read([text], eager=False)
    assert read([text], eager=True) == found
    return found


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("hello\n", "hello\n", []),
        (WEATHER, "", [("weather", '{"city": "Oslo"}')]),
        (f"Let me see. \n{WEATHER}", "Let me see.", [("weather", '{"city": "Oslo"}')]),
        (f"{WEATHER}\n{TIME}\n", "", [("weather", '{"city": "Oslo"}'), ("time", "{}")]),
        (f"x\n\n{TIME}\n \ny", "x\n \ny", [("time", "{}")]),
        (f"{TIME} and {TIME}", "and", [("time", "{}"), ("time", "{}")]),
        (f'{OPEN}{{"arguments": {{"b": [1]}}, "name": "f"}}{CLOSE}', "", [("f", '{"b": [1]}')]),
        (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [("f", "{}")]),
        (f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}{CLOSE}', "", [("f", '{"a": 1}')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"a": "{CLOSE}}}"}}}}{CLOSE}', "", [("f", f'{{"a": "{CLOSE}}}"}}')]),
        (f'{OPEN}{{"name": "g\\u00e9", "arguments": {{}}}}{CLOSE}', "", [("gé", "{}")]),
        (TIME.removesuffix(CLOSE), "", [("time", "{}")]),
        (WEATHER[:52], "", [("weather", '{"city"')]),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read_all(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        f"a {OPEN}no JSON{CLOSE} b",
        f"{OPEN}{CLOSE}",
        f'{OPEN}{{"name": "f"{CLOSE} ',
        f'{OPEN}{{"name": 5, "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": [1]}}{CLOSE}',
        f'{OPEN}["f"]{CLOSE}',
        f'{OPEN}{{"name": "f", "argum',
        f"use {OPEN} tags",
        "cut <tool_c \n",
        CLOSE,
    ],
)
def test_what_is_no_call_stays_content_to_the_last_character(text: str) -> None:
    assert read_all(text) == (text, [])


@pytest.mark.parametrize(
    ("arguments", "eager_arguments"),
    [('{"a": }', '{"a": }'), ('{"a": 1', '{"a": 1'), ('{"a": 1, "b"! 2}', '{"a": 1, "b"! 2}'), ('{"a" 1}', '{"a" 1}')],
)
def test_malformed_arguments_are_content_unless_they_were_given_away(arguments: str, eager_arguments: str) -> None:
    text = f'x {OPEN}{{"name": "f", "arguments": {arguments}}}{CLOSE} y'
    content, calls = read([text], eager=False)
    assert (content, calls) == (text, [])
    content, calls = read([text], eager=True)
    assert content == "x y" and calls[0][0] == "f"
    assert calls[0][1].startswith(eager_arguments)
    assert OPEN not in calls[0][1] and CLOSE not in calls[0][1]


def test_a_block_that_was_none_may_hold_one() -> None:
    assert read_all(f'{OPEN}{{"x {WEATHER}') == (f'{OPEN}{{"x', [("weather", '{"city": "Oslo"}')])


def test_arguments_come_while_they_arrive() -> None:
    parser = Hermes().parser(eager=True)
    assert parser.push(f"Well.\n{OPEN}").content == "Well."
    assert parser.push('{"name": "weather", ').calls == []
    (first,) = parser.push('"arguments": ').calls or parser.push('{"ci').calls[:1]
    assert (first.name, first.index, first.arguments) == ("weather", 0, "")
    assert [piece.arguments for piece in parser.push('ty": "Os').calls] == ['ty": "Os']
    assert [piece.arguments for piece in parser.push('lo"').calls] == ['lo"']
    assert [piece.arguments for piece in parser.push("}}").calls] == ["}"]
    assert parser.push(CLOSE).calls == [] and parser.finish().content == ""


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=14), st.data(), st.booleans())
def test_where_a_text_is_split_makes_no_difference(pieces: list[str], data: st.DataObject, eager: bool) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    split = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(split, eager=eager) == read([text], eager=eager)


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=14))
def test_nothing_is_lost_and_whole_calls_are_json(pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = read([text], eager=False)
    if not calls:
        assert content == text
    for index, (_, arguments) in enumerate(calls):
        if index + 1 < len(calls):  # the last may be cut off
            assert isinstance(json.loads(arguments, strict=False), dict)


# -- grammars ----------------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
HELD = Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}})
LOOSE = Tool.model_validate({"type": "function", "function": {"name": "time", "parameters": CITY}})
LOOSE_CALL = f'{OPEN}\n{{"name": "time", "arguments": {{"zone": [1]}}}}\n{CLOSE}'
TIME_IN_OSLO = f'{OPEN}\n{{"name": "time", "arguments": {{"city": "Oslo"}}}}\n{CLOSE}'
TOKENIZER = LLTokenizer(byte_level().backend_tokenizer.to_str(), eos_token=byte_level().eos_token_id)


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = byte_level().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "free", "free_one", "forced", "forced_one", "or_answer"),
    [
        ("", True, True, False, False, False),
        ("hello <tool", True, True, False, False, False),
        ('{"a": 1}', True, True, False, False, True),
        (WEATHER, True, True, True, True, True),
        (f"First.\n{WEATHER}", True, True, False, False, False),
        (f"{WEATHER}\n{WEATHER}", True, False, True, False, False),
        (f"{WEATHER}\nSo be it.", True, False, False, False, False),
        (LOOSE_CALL, True, True, False, False, True),
        (TIME_IN_OSLO, True, True, True, True, True),
        (WEATHER.replace("Oslo", "Rome"), False, False, False, False, False),
        (WEATHER.replace("weather", "whether"), False, False, False, False, False),
        (f"x {OPEN} y", False, False, False, False, False),
    ],
)
def test_what_grammars_allow(
    text: str, free: bool, free_one: bool, forced: bool, forced_one: bool, or_answer: bool
) -> None:
    form, tools = Hermes(), [HELD, LOOSE]
    answer = '{"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}'
    assert allows(form.free_grammar(tools, parallel=True), text) == free
    assert allows(form.free_grammar(tools, parallel=False), text) == free_one
    assert allows(form.forced_grammar(tools, parallel=True, enforce_all=True), text) == forced
    assert allows(form.forced_grammar(tools, parallel=False, enforce_all=True), text) == forced_one
    assert allows(form.forced_grammar(tools, parallel=False, enforce_all=False, answer=answer), text) == or_answer
