"""Bounds on how many values a JSON body holds, checked before it is parsed.

Parsing and validating hold the interpreter's lock, so their cost must be bounded by more than bytes: 4 MiB may be one
text, parsed in 2 ms, or 1.4 million empty lists, which take 400 ms and 200 MB.
"""

from __future__ import annotations

from server.errors import BadRequest

MAX_OBJECTS = 2**15  # objects and lists of a body together: 4096 messages have 8 each
MAX_STRINGS = 2**17  # names of fields included
MAX_VALUES = 2**20 + 2**16  # all values; a list of token ids has up to 2**20
FEW = 2**11  # so many structural characters are never too much


def check_body_size(raw: bytes) -> None:
    """Raises BadRequest where the JSON text `raw` holds more values than a body may.

    The counts are those of the characters that open, separate and quote values outside strings. Text that is not JSON
    may be counted wrongly, which is no matter: it is refused anyway.
    """
    if raw.count(b'"') + raw.count(b",") + raw.count(b"[") + raw.count(b"{") <= FEW:
        return
    if b"\\" in raw:  # without escapes, every quote begins or ends a string
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    refuse_more(raw.count(b'"') // 2, MAX_STRINGS, "strings")
    outside = b"".join(raw.split(b'"')[::2])
    refuse_more(outside.count(b"[") + outside.count(b"{"), MAX_OBJECTS, "objects and lists")
    refuse_more(outside.count(b",") + 1, MAX_VALUES, "values")


def refuse_more(count: int, limit: int, kind: str) -> None:
    if count > limit:
        message = f"The body has {count} {kind}; at most {limit} are accepted in one request."
        raise BadRequest(message, code="request_too_large")
