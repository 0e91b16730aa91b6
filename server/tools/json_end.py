"""Where a JSON object ends that arrives piece by piece."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[\s\w+\-.,:]*")  # what stands between strings and brackets, valid JSON or not


class JsonEnd:
    """Follows the brackets and strings of one object. `at` counts the characters that surely belong to it; `is_over`
    says that it is complete, `is_broken` that what comes at `at` has no place in any JSON."""

    def __init__(self) -> None:
        self.at = 0
        self.is_over = False
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def follow(self, text: str) -> None:
        """`text` is all of it so far, and more each time."""
        while self.at < len(text) and not (self.is_over or self.is_broken):
            if self._in_string:
                self._follow_string(text[self.at])
                self.at += 1
            elif (match := _PLAIN.match(text, self.at)) and match.end() > self.at:
                self.at = match.end()
            else:
                self._follow_mark(text[self.at])

    def _follow_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _follow_mark(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
        elif not self._open or char != self._open.pop():
            self.is_broken = True
            return
        self.at += 1
        self.is_over = not self._open
