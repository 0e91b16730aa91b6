"""The rotary settings of a GGUF file, as llama.cpp computes with them (llama-context.cpp, ggml's rope_yarn).

none       the frequencies of rope.freq_base, divided by rope_freqs.weight where the file has it
linear     positions divided by rope.scaling.factor
yarn       long wavelengths divided by the factor; cosines and sines times 1 + 0.1 ln(factor) times attn_factor
longrope   divided by rope_factors_short.weight or rope_factors_long.weight; cosines and sines times attn_factor
"""

from __future__ import annotations

import math

from model.config import RopeConfig
from model.errors import BadWeights, UnsupportedModel
from model.gguf_file import GgufFile
from model.gguf_values import Values

FREQS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({FREQS, SHORT, LONG})
"""They are part of the configuration here, not weights."""
_KINDS = ("none", "linear", "yarn", "longrope")


def rope_from_gguf(file: GgufFile, values: Values, head_dim: int) -> RopeConfig:
    """Raises UnsupportedModel and BadConfig, which name the key, and BadWeights for factors that do not fit."""
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.string("rope.scaling.type", "none")
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{file.path}: rope scaling {kind!r} is not supported; its angles may depend on the length of the text, "
            f"which would make cached keys stale. Supported: {', '.join(_KINDS)}, and factors in {FREQS}."
        )
    factor = values.positive("rope.scaling.factor", 1.0)
    factors = _factors(file, FREQS, head_dim)
    if factors is not None and kind != "none" and (kind != "linear" or factor != 1.0):
        raise UnsupportedModel(f"{file.path}: {kind} rope scaling together with {FREQS} is not supported.")
    attention = values.number("rope.scaling.attn_factor", 1.0) or 1.0
    original = values.integer("rope.scaling.original_context_length", values.integer("context_length"))
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=values.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.positive("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        )
    if kind == "longrope":
        if factor != 1.0:
            raise UnsupportedModel(f"{file.path}: longrope with {values.name('rope.scaling.factor')} is not supported.")
        return RopeConfig(
            theta=theta,
            kind="longrope",
            original_max_positions=original,
            attention_factor=attention,
            short_factors=_needed_factors(file, SHORT, head_dim),
            long_factors=_needed_factors(file, LONG, head_dim),
        )
    if attention != 1.0:
        raise UnsupportedModel(f"{file.path}: {values.name('rope.scaling.attn_factor')} is only supported with yarn.")
    if kind == "none":
        return RopeConfig(theta=theta, frequency_factors=factors)
    return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_factors=factors)


def _needed_factors(file: GgufFile, tensor: str, head_dim: int) -> tuple[float, ...]:
    factors = _factors(file, tensor, head_dim)
    if factors is None:
        raise BadWeights(f"{file.path} has no tensor {tensor}, which longrope needs.")
    return factors


def _factors(file: GgufFile, tensor: str, head_dim: int) -> tuple[float, ...] | None:
    if tensor not in file.tensors:
        return None
    factors = file.tensor(tensor).flatten().tolist()
    if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
        raise BadWeights(f"{file.path}: {tensor} holds {len(factors)} factors, expected {head_dim // 2} above 0.")
    return tuple(factors)
