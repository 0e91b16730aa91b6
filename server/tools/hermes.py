"""Calls as Hermes writes them, and Qwen, SmolLM2 and many more that were taught by its data:

    I will look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A block that is no such object stays content, tags and all. Whitespace around blocks is nobody's, but for what parts the
text after them from the text before. A block that the text's end cuts off is a call as far as it went, once its
arguments have begun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.structured.body import schema_text
from server.text.chat_template import joined
from server.tools.body import Tool
from server.tools.calls import CallPiece, Pieces, new_call_id, object_in
from server.tools.json_end import JsonEnd

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
TAIL = re.compile(rf"\s*\}}\s*{CLOSE}")
WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}  # within arguments; as for every other schema

Json = dict[str, Any]


class Hermes:
    tags: tuple[str, ...] = (OPEN, CLOSE)

    def parser(self, *, eager: bool) -> HermesParser:
        return HermesParser(eager)

    def free_grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """The text is free up to the first OPEN: a lazy lexeme ends there."""
        calls = "start: (call)* TEXT" if parallel else "start: call | TEXT"
        return (
            f"{calls}\ncall: opening {alternatives(tools)} {quoted(CLOSING)}\n"
            f"opening[lazy]: TEXT {quoted(OPEN)}\nTEXT: /(.|\\n)*/\n{bodies(tools, enforce_all=False)}"
        )

    def forced_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, enforce_all: bool, answer: str | None = None
    ) -> str:
        calls = f"call ({quoted(chr(10))} call)*" if parallel else "call"
        start = f"start: {calls}\n" if answer is None else f"start: {calls} | answer\nanswer: {json_rule(answer)}\n"
        call = f"call: {quoted(OPEN)} {alternatives(tools)} {quoted(CLOSING)}\n"
        return start + call + bodies(tools, enforce_all)

    def as_text(self, messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
        made: list[Json] = []
        for message in messages:
            if message["role"] == "tool":
                add_answer(made, joined(message["content"]))
            elif message.get("tool_calls"):
                made.append({"role": message["role"], "content": with_calls(message)})
            else:
                made.append(dict(message))
        if tools:
            told = instructions(tools)
            if made and made[0]["role"] == "system":
                made[0]["content"] = f"{joined(made[0]['content'])}\n\n{told}"
            else:
                made.insert(0, {"role": "system", "content": told})
        return made


# -- what models are told where their template does not ---------------------------------------------------------------


def instructions(tools: Sequence[Tool]) -> str:
    signatures = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions to help with what the user asks. Their signatures are:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        "To call a function, answer with its name and its arguments as a JSON object within tags; "
        "repeat that for several calls:\n"
        f'{OPEN}\n{{"name": "the function\'s name", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
    )


def with_calls(message: Json) -> str:
    parts = [joined(message["content"])] if message.get("content") else []
    for call in message["tool_calls"]:
        said = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        parts.append(f"{OPEN}\n{json.dumps(said, ensure_ascii=False)}\n{CLOSE}")
    return "\n".join(parts)


def add_answer(made: list[Json], content: str) -> None:
    """The answers to several calls are one turn of the user's: many templates want turns to alternate."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    if made and made[-1].get("answers"):
        made[-1]["content"] += f"\n{text}"
    else:
        made.append({"role": "user", "content": text, "answers": True})


# -- grammars ---------------------------------------------------------------------------------------------------------

CLOSING = f"}}\n{CLOSE}"


def alternatives(tools: Sequence[Tool]) -> str:
    return "(" + " | ".join(f"body_{index}" for index in range(len(tools))) + ")"


def bodies(tools: Sequence[Tool], enforce_all: bool) -> str:
    """The rules of the text between OPEN and CLOSING; loose arguments are any object. Raises BadRequest."""
    rules = []
    for index, tool in enumerate(tools):
        is_held = enforce_all or tool.function.strict
        schema = schema_text(tool.function.arguments if is_held else {"type": "object"}, "tools")
        head = f'\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
        rules.append(f"body_{index}: {quoted(head)} {json_rule(schema)}\n")
    return "".join(rules)


def json_rule(schema: str) -> str:
    found = orjson.loads(schema)
    return "%json " + orjson.dumps(found | {"x-guidance": WHITESPACE} if isinstance(found, dict) else found).decode()


def quoted(text: str) -> str:
    return json.dumps(text)


# -- parser -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    """A block that is being read: its text after OPEN, and what is known of it. Positions count from its start."""

    text: str = ""
    begins: int | None = None  # where the arguments begin, once there is a head
    name: str = ""
    end: JsonEnd | None = None
    given: int | None = None  # how much of the arguments was given away; None: not even the call itself


class HermesParser:
    """Outside of a block it holds back whitespace and what could become OPEN; inside, all until the block is whole, or
    when `eager` until its arguments begin."""

    def __init__(self, eager: bool) -> None:
        self._eager = eager
        self._held = ""  # text outside
        self._space = ""  # whitespace before the current block, in case it is none
        self._block: Block | None = None
        self._calls = 0
        self._after_call = False
        self._has_spoken = False

    def push(self, text: str) -> Pieces:
        pieces = Pieces()
        if self._block is None:
            self._held += text
        else:
            self._block.text += text
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> Pieces:
        pieces = Pieces()
        block = self._block
        if block is not None and not self._end_cut_off(block, pieces):
            self._give_up(block, pieces)
            while self._advance(pieces):
                pass
            if self._block is not None:  # another block within the one that was none
                return merged(pieces, self.finish())
        if self._block is None:
            self._say(self._held, pieces)
        self._held = ""
        return pieces

    def _advance(self, pieces: Pieces) -> bool:
        """One move, from outside into a block or the other way; False when there is nothing to do before more comes."""
        if self._block is None:
            return self._read_outside(pieces)
        return self._read_block(self._block, pieces)

    # outside

    def _read_outside(self, pieces: Pieces) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            said = before.rstrip()
            self._say(said, pieces)
            self._space, self._held, self._block = before[len(said) :], "", Block(after)
            return True
        safe = len(before) - overlap(before, OPEN)
        said = before[:safe].rstrip()
        self._say(said, pieces)
        self._held = before[len(said) :]
        return False

    def _say(self, text: str, pieces: Pieces) -> None:
        """Between what is said before a call and after it there is the whitespace after it."""
        if self._after_call:
            rest = text.lstrip()
            self._after_call = not rest
            text = text if rest and self._has_spoken else rest
        self._has_spoken |= bool(text)
        pieces.content += text

    def _give_up(self, block: Block, pieces: Pieces) -> None:
        """It was no call: its tag was content, and so is what is in it, unless that holds a block of its own."""
        self._say(self._space + OPEN, pieces)
        self._block, self._held = None, block.text

    # inside

    def _read_block(self, block: Block, pieces: Pieces) -> bool:
        if block.end is None and (head := HEAD.match(block.text)):
            block.begins, block.name, block.end = head.end(), json_string(head[1]), JsonEnd()
        if block.end is None or block.begins is None:
            return self._read_unusual(block, pieces)
        block.end.follow(block.text[block.begins :])
        if self._eager:
            self._give(block, block.end.at, pieces)
        if block.end.is_over:
            return self._read_tail(block, block.begins + block.end.at, pieces)
        return block.end.is_broken and self._read_broken(block, pieces)

    def _read_tail(self, block: Block, start: int, pieces: Pieces) -> bool:
        tail = TAIL.match(block.text, start)
        if tail is None:
            return CLOSE in block.text[start:] and self._read_broken(block, pieces)
        if not self._eager and object_in(block.text[block.begins : start]) is None:
            self._give_up(block, pieces)
            return True
        self._give(block, start - (block.begins or 0), pieces)
        self._leave(block.text[tail.end() :])
        return True

    def _read_broken(self, block: Block, pieces: Pieces) -> bool:
        """What cannot be taken back: given away, the text up to CLOSE is passed on as it is if it is of the arguments,
        else dropped."""
        if not self._eager:
            return self._read_unusual(block, pieces)
        assert block.end is not None and block.begins is not None
        start = block.begins + (block.given or 0)
        stop = block.text.find(CLOSE, start)
        known = stop if stop >= 0 else len(block.text) - overlap(block.text, CLOSE)
        if not block.end.is_over:
            self._give(block, known - block.begins, pieces)
        if stop < 0:
            return False
        self._leave(block.text[stop + len(CLOSE) :])
        return True

    def _read_unusual(self, block: Block, pieces: Pieces) -> bool:
        """Members in another order, or others than usual: wait for all of it."""
        inner, close, after = block.text.partition(CLOSE)
        if not close and inner.lstrip()[:1] in ("", "{"):
            return False
        found = call_in(inner) if close else None
        if found is None:
            self._give_up(block, pieces)
        else:
            self._give_whole(*found, pieces)
            self._leave(after)
        return True

    def _end_cut_off(self, block: Block, pieces: Pieces) -> bool:
        """The text ended within the block: whether it is a call all the same."""
        if block.end is None or (block.end.is_broken and not self._eager):
            found = call_in(block.text)
            if found is not None:
                self._give_whole(*found, pieces)
            return found is not None
        assert block.begins is not None
        if not self._eager and block.end.is_over and object_in(block.text[block.begins :][: block.end.at]) is None:
            return False
        broken = block.end.is_broken
        self._give(block, len(block.text) - block.begins if broken else block.end.at, pieces)
        return True

    def _give(self, block: Block, upto: int, pieces: Pieces) -> None:
        """Give away the call, and its arguments up to there."""
        assert block.begins is not None
        if block.given is None:
            pieces.calls.append(CallPiece(self._calls, id=new_call_id(), name=block.name))
            self._calls += 1
            block.given = 0
        if upto > block.given:
            text = block.text[block.begins + block.given : block.begins + upto]
            pieces.calls.append(CallPiece(self._calls - 1, text))
            block.given = upto

    def _give_whole(self, name: str, arguments: str, pieces: Pieces) -> None:
        pieces.calls.append(CallPiece(self._calls, id=new_call_id(), name=name))
        pieces.calls.append(CallPiece(self._calls, arguments))
        self._calls += 1

    def _leave(self, after: str) -> None:
        self._block, self._held, self._after_call = None, after, True


def merged(first: Pieces, second: Pieces) -> Pieces:
    return Pieces(first.content + second.content, first.calls + second.calls)


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag` and is not all of it."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def json_string(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:  # an escape that JSON does not have
        return literal[1:-1]


def call_in(text: str) -> tuple[str, str] | None:
    """(name, arguments) of a block's whole text, or None."""
    found = object_in(text)
    if found is None or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):  # already as text
        return None if object_in(arguments) is None else (found["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return found["name"], json.dumps(arguments, ensure_ascii=False)
