"""Types and ranges of the values in a config.json, before transformers or the network computes with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config_check import LARGEST
from model.errors import BadConfig


@dataclass(frozen=True, slots=True)
class _Rule:
    """`expected` is what an error says of `holds`."""

    expected: str
    holds: Callable[[Any], bool]


def _between(above: float, below: float) -> Callable[[Any], bool]:
    """A number in the open interval, which NaN is not."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and above < value < below


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


_SIZE = _Rule(f"an integer from 1 to {LARGEST}", _is_size)
_OPTIONAL_SIZE = _Rule(f"{_SIZE.expected} or null", lambda value: value is None or _is_size(value))
_SWITCH = _Rule("true or false", lambda value: isinstance(value, bool | None))
_OBJECT = _Rule("an object or null", lambda value: isinstance(value, dict | None))
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), _SIZE),
    "num_key_value_heads": _OPTIONAL_SIZE,
    "head_dim": _Rule(
        "an even integer above 0, or null", lambda value: value is None or (_is_size(value) and value % 2 == 0)
    ),
    "sliding_window": _Rule(_OPTIONAL_SIZE.expected, lambda value: value in (None, 0) or _is_size(value)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), _SWITCH),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
    "hidden_act": _Rule("a string", lambda value: isinstance(value, str)),
    "rms_norm_eps": _Rule("a number above 0 and below 1", _between(0, 1)),
    "rope_theta": _Rule("a number above 1", lambda value: value is None or _between(1, 1e30)(value)),
}


_ROTARY_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"),
)


def check_values(file: Path, raw: Mapping[str, Any]) -> None:
    """`raw` is the whole object; keys that it leaves out have transformers' defaults. Raises BadConfig."""
    for key, rule in _RULES.items():
        if key in raw and not rule.holds(raw[key]):
            raise BadConfig(f"{file}: {key} is {short(raw[key])}, expected {rule.expected}.")
    for holder in ("rope_scaling", "rope_parameters"):
        for key in _ROTARY_NUMBERS:
            value = (raw.get(holder) or {}).get(key)
            if value is not None and not _between(0, math.inf)(value):
                raise BadConfig(f"{file}: rotary setting {key} is {short(value)}, expected a number above 0.")
    vocab_size = raw.get("vocab_size", LARGEST)
    for key in ("eos_token_id", "bos_token_id"):
        token_ids(file, key, raw.get(key), vocab_size)


def token_ids(file: Path, key: str, value: object, vocab_size: int) -> list[int]:
    """The ids in a value that may be one id, several, or null; -1 is how some files say that there is none.

    Raises BadConfig for what no token of the vocabulary can be.
    """
    ids: list[int] = []
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None or token_id == -1:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise BadConfig(f"{file}: {key} is {short(value)}, expected token ids below {vocab_size}.")
        ids.append(token_id)
    return ids


def is_nested_too_deep(value: object, levels: int = 64) -> bool:
    """No config has more than a few levels; what is deeper would end in a RecursionError somewhere."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_nested_too_deep(each, levels - 1) for each in inner)


def short(value: object) -> str:
    """A value as an error shows it."""
    text = json.dumps(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
