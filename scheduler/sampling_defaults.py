"""How the next token is chosen where a request does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_TOP_K = "top_k"
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


class BadDefault(Exception):
    """A value that no request could have, or a name that is no sampling field; the message is one line."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A request's own fields override these, one by one. The values here are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, values: Mapping[str, object], origin: str = "") -> SamplingDefaults:
        """OpenAI's defaults, and `values` in their place; errors name their `origin`. Raises BadDefault."""
        where = f"{origin}: " if origin else ""
        return cls(**{name: _checked(name, value, where) for name, value in values.items()})  # type: ignore[arg-type]


def _checked(name: str, value: object, where: str) -> float | int:
    if name not in _RANGES:
        raise BadDefault(f"{where}{name!r} is not one of {', '.join(_RANGES)}")
    low, high = _RANGES[name]
    wanted = int if name == _TOP_K else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise BadDefault(f"{where}{name} is {value!r}, not {'an integer' if wanted is int else 'a number'}")
    if not low <= value <= high or (name == "top_p" and value == 0):  # false for NaN
        raise BadDefault(f"{where}{name} is {value!r}, which is outside its range")
    return value if name == _TOP_K else float(value)
