"""The metadata of one architecture in a GGUF file, by type: a value of another type, or out of range, is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from model.config_check import LARGEST
from model.errors import BadConfig, UnsupportedModel
from model.gguf_file import GgufFile, shorten


class Values:
    """The `<architecture>.*` keys of a file, by type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def _get(self, key: str, default: Any) -> Any:
        value = self._file.get(self.name(key), default)
        if value is None:
            raise BadConfig(f"{self._file.path} has no {self.name(key)} in its metadata.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list):  # one value per layer, as networks with uneven layers have
            if len({repr(each) for each in value}) != 1:
                raise UnsupportedModel(f"{self._file.path}: {self.name(key)} differs between layers: {shorten(value)}")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise self._wrong(key, value, f"an integer from 1 to {LARGEST}")
        if value == 0 and default != 0:
            raise self._wrong(key, value, f"an integer from 1 to {LARGEST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float32 of the file as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06.

        That is what the number was before it was written, so the same model read from either format agrees.
        """
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(str(np.float32(value)))

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, value, "a number above 0")
        return value

    def string(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> BadConfig:
        return BadConfig(f"{self._file.path}: {self.name(key)} is {shorten(value)}, expected {expected}.")
