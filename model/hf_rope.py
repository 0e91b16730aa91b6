"""The rotary settings of a Hugging Face config, as transformers' `rope_parameters` has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import RopeConfig
from model.errors import BadConfig, UnsupportedModel


@dataclass(frozen=True, slots=True)
class _Parameters:
    """`rope_parameters` (or `rope_scaling`) of one config.json; every value is checked as it is read."""

    file: Path
    values: Mapping[str, Any]
    head_dim: int
    max_positions: int

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:  # false for NaN
            raise BadConfig(f"{self.file}: rotary setting {key} is {value!r}, expected a number above {above:g}.")
        return float(value)

    def original_positions(self) -> int:
        return int(self.number("original_max_position_embeddings", self.max_positions))

    def factors(self, key: str) -> tuple[float, ...]:
        values = self.values.get(key)
        wanted = self.head_dim // 2
        if not isinstance(values, list) or len(values) != wanted or not all(_is_factor(value) for value in values):
            raise BadConfig(f"{self.file}: rotary setting {key} is not a list of {wanted} numbers above 0.")
        return tuple(float(value) for value in values)

    def without_extension(self) -> RopeConfig:
        return RopeConfig(theta=self.number("rope_theta", above=1.0))

    def linear(self) -> RopeConfig:
        return RopeConfig(theta=self.number("rope_theta", above=1.0), kind="linear", factor=self.number("factor"))

    def llama3(self) -> RopeConfig:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if low == high:
            raise BadConfig(f"{self.file}: rotary settings low_freq_factor and high_freq_factor are both {low:g}.")
        return RopeConfig(
            theta=self.number("rope_theta", above=1.0),
            kind="llama3",
            factor=self.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=self.original_positions(),
        )

    def yarn(self) -> RopeConfig:
        original = self.original_positions()
        factor = self.number("factor", self.max_positions / original)
        return RopeConfig(
            theta=self.number("rope_theta", above=1.0),
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=self.number("beta_fast") if self.values.get("beta_fast") else 32.0,
            beta_slow=self.number("beta_slow") if self.values.get("beta_slow") else 1.0,
            truncate=bool(self.values.get("truncate", True)),
            attention_factor=self._yarn_attention(factor),
        )

    def _yarn_attention(self, factor: float) -> float:
        if self.values.get("attention_factor") is not None:
            return self.number("attention_factor")
        scale = math.log(max(factor, 1.0))
        if self.values.get("mscale") and self.values.get("mscale_all_dim"):
            above, below = (0.1 * self.number(key) * scale + 1.0 for key in ("mscale", "mscale_all_dim"))
            return above / below
        return 0.1 * scale + 1.0

    def longrope(self) -> RopeConfig:
        original = self.original_positions()
        factor = self.number("factor", self.max_positions / original)
        advised = 1.0 if factor <= 1.0 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeConfig(
            theta=self.number("rope_theta", above=1.0),
            kind="longrope",
            factor=factor,
            original_max_positions=original,
            attention_factor=self.number("attention_factor", advised),
            short_factors=self.factors("short_factor"),
            long_factors=self.factors("long_factor"),
        )


_SCHEMES: dict[str, Callable[[_Parameters], RopeConfig]] = {
    "default": _Parameters.without_extension,
    "linear": _Parameters.linear,
    "llama3": _Parameters.llama3,
    "yarn": _Parameters.yarn,
    "longrope": _Parameters.longrope,
}


def rope_from_hf(file: Path, parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """`parameters` is transformers' own `rope_parameters`, which has one spelling for all versions of the file.

    Raises:
        BadConfig: a value that cannot be; the key is named.
        UnsupportedModel: a scheme whose angles depend on the length of the text, or positions for a part of a head.
    """
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or parameters.get("mrope_section"):
        raise UnsupportedModel(f"{file}: partial or sectioned rotary positions are not supported: {dict(parameters)}")
    kind = parameters.get("rope_type", "default")
    scheme = _SCHEMES.get(kind) if isinstance(kind, str) else None
    if scheme is None:
        raise UnsupportedModel(
            f"{file}: rope type {kind!r} is not supported; its angles may depend on the length of the text, which "
            f"would make cached keys stale. Supported: {', '.join(_SCHEMES)}."
        )
    return scheme(_Parameters(file, parameters, head_dim, max_positions))


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
