"""What parsers of tool calls have in common: what they are, and what they give."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.json_depth import is_too_deep
from server.tools.body import Tool

Json = dict[str, Any]

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of call `index`. Its first one has the id and the name; the arguments, JSON text, come piece by piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Pieces:
    """What became certain of a text: content for the reader, and parts of calls."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    """A call as far as it is known."""

    id: str
    name: str
    arguments: str

    @property
    def input(self) -> Json | None:
        """The arguments as the object they spell; None where they were cut off, or spell none."""
        return object_in(self.arguments)


def object_in(text: str) -> Json | None:
    """The JSON object that the text spells, unless it is nested too deep to be sent back. Models write line breaks
    within strings as they are."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_too_deep(found) else None


class ToolParser(Protocol):
    """Reads one text while it arrives; what it gives does not depend on where the text is split."""

    def push(self, text: str) -> Pieces: ...

    def finish(self) -> Pieces:
        """The text is over."""


class ToolFormat(Protocol):
    """One way in which models write calls. `tags` are the texts that begin and end them; some tokenizers have a special
    token for each."""

    tags: tuple[str, ...]

    def parser(self, *, eager: bool) -> ToolParser:
        """`eager` gives arguments while they arrive, before it is known whether the call will be whole."""

    def free_grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Lark, for text with calls in it; the arguments of strict functions match their schemas. Raises BadRequest."""

    def forced_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, enforce_all: bool, answer: str | None = None
    ) -> str:
        """Lark, for one call or several and nothing else, or else what matches the JSON schema `answer`. Raises
        BadRequest."""

    def as_text(self, messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
        """A conversation for a chat template that knows no tools: calls, answers and tools written out."""


class ToolReading:
    """How the calls of one choice are read. A choice that ends with calls has a finish reason of their own, unless
    the client named the function, as OpenAI has it."""

    def __init__(self, parser: ToolParser, *, is_named: bool) -> None:
        self.finish_reason = "stop" if is_named else "tool_calls"
        self._parser = parser

    def read(self, text: str, *, is_end: bool) -> Pieces:
        pieces = self._parser.push(text)
        if is_end:
            rest = self._parser.finish()
            pieces = Pieces(pieces.content + rest.content, pieces.calls + rest.calls)
        return pieces


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other, and all others take any."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))


def collect(calls: list[Call], pieces: Sequence[CallPiece]) -> None:
    """Add pieces to the calls they belong to."""
    for piece in pieces:
        if piece.id is not None:
            calls.append(Call(piece.id, piece.name or "", piece.arguments))
        else:
            calls[piece.index].arguments += piece.arguments
