"""The texts of grammars, as clients write them and as llguidance reads them, and its faults in plain words."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from scheduler.messages import Grammar, GrammarKind
from scheduler.vocabulary import Speller

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_FAULT_CHARS = 400

# Given last, so that a schema's own "x-guidance" changes nothing. A run of whitespace ends: a weak model would not.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarFault(Exception):
    """The grammar cannot be compiled or held to; the message names the fault."""


def as_llguidance(grammar: Grammar, speller: Speller) -> str:
    """A grammar in llguidance's own spelling. Raises GrammarFault."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS))
            except ValueError as error:
                raise GrammarFault(one_line(str(error))) from None
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.CHOICE:
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        case GrammarKind.GRAMMAR:
            try:  # Lark as it is; GBNF, which llama.cpp and xgrammar take, in Lark's spelling
                return with_token_ids(str(any_to_lark(grammar.text)), speller)
            except RecursionError:
                raise GrammarFault("the grammar is nested too deep") from None
            except Exception as error:  # its own error is no one type
                raise GrammarFault(one_line(str(error))) from None
    raise GrammarFault(f"unknown kind of grammar {grammar.kind!r}")


LARK_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(<[^<>\s\[\]]+>)')
"""A string, a comment or a regex of Lark; or outside of them a token by its name, which is the group."""


def with_token_ids(lark: str, speller: Speller) -> str:
    """Lark that names tokens of text, such as `<think>` without quotes, by their ids: llguidance looks names up among
    special tokens alone."""

    def by_id(piece: re.Match[str]) -> str:
        token = speller.token_of(piece[1]) if piece[1] else None
        return piece[0] if token is None else f"<[{token}]>"

    return LARK_PIECE.sub(by_id, lark)


def raise_fault(matcher: LLMatcher) -> None:
    if matcher.is_error():
        told = one_line(matcher.get_error())
        raise GrammarFault("no text matches it" if told.startswith("NoExtension") else told)


def one_line(text: str) -> str:
    """llguidance's message without its picture of the place and without its state."""
    text = text.split("<state>")[0].split("<non-verbose/>")[0]
    text = re.sub(r"\s+", " ", text).strip().rstrip(".")
    return text if len(text) <= MAX_FAULT_CHARS else text[:MAX_FAULT_CHARS] + "..."
