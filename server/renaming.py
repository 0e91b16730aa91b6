"""Errors about a body that was made of another one: they name the fields that the client wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.errors import BadRequest

Renamings = Sequence[tuple[str, str]]
"""(pattern of a part of a path, what it becomes), in the order in which they are applied."""


@contextmanager
def named_as(renamings: Renamings) -> Iterator[None]:
    """A BadRequest that passes through names its field by the client's name, in `param` and in the message."""
    try:
        yield
    except BadRequest as error:
        if error.param is not None:
            param = renamed(error.param, renamings)
            error.message = error.message.replace(repr(error.param), repr(param))
            error.param = param
        raise


def renamed(path: str, renamings: Renamings) -> str:
    for pattern, name in renamings:
        path = re.sub(pattern, name, path)
    return path
