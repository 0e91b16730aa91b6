"""How the makers of a model advise to sample from it, as its files say.

Hugging Face directories say it in generation_config.json, GGUF files in `general.sampling.*`. The values are
returned as the file has them: whoever uses them checks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from model.errors import UnsupportedModel
from model.gguf_file import GgufFile

GENERATION_CONFIG = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def advice_of_directory(path: Path) -> dict[str, object]:
    """Raises UnsupportedModel: generation_config.json is not a JSON object."""
    file = path / GENERATION_CONFIG
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file} is not a JSON object.")
    return _given(found)


def advice_of_gguf(file: GgufFile) -> dict[str, object]:
    return _given({name: file.get(f"general.sampling.{key}") for key, name in _GGUF_KEYS.items()})


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: values[name] for name in NAMES if values.get(name) is not None}
