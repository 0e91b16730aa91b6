"""Lists of token ids in bodies: checked in slices, so that a list of a million does not hold the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from server.strict import misplaced

SLICE = 2**14  # ids checked at a time
MAX_TOKEN_IDS = 2**20


def first_bad(ids: Sequence[Any], vocab_size: int | None = None) -> int | None:
    """The index of the first of `ids` that is no integer in [0, vocab_size), or None. Without `vocab_size` there is no
    upper end."""
    for start in range(0, len(ids), SLICE):
        part = ids[start : start + SLICE]
        if set(map(type, part)) == {int} and min(part) >= 0 and (vocab_size is None or max(part) < vocab_size):
            continue
        for index, token_id in enumerate(part, start):
            if type(token_id) is not int or token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                return index
    return None


def check_token_ids(value: Any) -> list[int]:
    """A list of integers from 0 on. Raises the error of a validation."""
    if not isinstance(value, list):
        raise ValueError("a list of token ids is wanted")
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"at most {MAX_TOKEN_IDS} token ids are accepted, not {len(value)}")
    index = first_bad(value)
    if index is not None:
        is_integer = type(value[index]) is int
        raise misplaced(index, "a token id is 0 or more" if is_integer else "a token id is an integer")
    return value


TokenIds = Annotated[
    list[int],
    PlainValidator(check_token_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_TOKEN_IDS}),
]
