"""How deep a client's own JSON may be nested: schemas, arguments of calls, variables of a template.

One depth holds for all of them, wherever they come in and in whatever spelling. It is far below what breaks the code
that passes them on: orjson writes 254 levels, the json module some 990, a chat template's tojson as many.
"""

from __future__ import annotations

from typing import Any

MAX_JSON_DEPTH = 128
TOO_DEEP = f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels"


def is_too_deep(value: Any) -> bool:
    """Whether objects and lists are nested deeper than MAX_JSON_DEPTH levels. Recursion has limits too."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for each in level for child in children(each)]
        if not level:
            return False
    return True


def children(value: Any) -> list[Any]:
    """The objects and lists within an object or a list."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]
