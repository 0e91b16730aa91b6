"""Rotary position embedding (Su et al. 2021), in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch

from model.config import RopeConfig

CHUNK = 4096
"""Positions per piece of the table: computed in pieces of one size, so that its bits never depend on its length."""


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2] on CPU.

    `linear` divides all of them (Chen et al. 2023); `llama3` and `yarn` (Peng et al. 2023) divide the long
    wavelengths, keep the short ones and interpolate between; `longrope` (Ding et al. 2024) divides one by one, as a
    file's own `frequency_factors` do.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    powers = config.theta**exponents
    plain = 1.0 / powers
    if config.frequency_factors is not None:
        factors = torch.tensor(config.frequency_factors, dtype=torch.float32, device="cpu")
        return 1.0 / (factors * powers) if config.kind == "longrope" else plain / factors
    match config.kind:
        case "none":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, powers, head_dim)
    raise ValueError(f"rotary scheme {config.kind!r} is not supported")


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    low, high, longest = config.low_freq_factor, config.high_freq_factor, config.original_max_positions
    wavelength = 2 * math.pi / plain
    smooth = (longest / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > longest / low, plain / config.factor, between)
    return torch.where(wavelength < longest / high, plain, scaled)


def _yarn(config: RopeConfig, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`powers` is theta**(2 i / head_dim). Dimensions below `low` keep their frequency, those above `high` are
    divided by the factor."""
    low, high = (_yarn_bound(config, turns, head_dim) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # Bounds that are equal make a step, not a division by 0.
    ramp = torch.clamp((dimensions - low) / (high - low if high != low else 0.001), 0, 1)
    kept = 1 - ramp
    return (1.0 / (config.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_bound(config: RopeConfig, turns: float, head_dim: int) -> float:
    """The dimension, as a real number, that turns so often over the original context."""
    wavelengths = config.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(wavelengths) / (2 * math.log(config.theta))


class RotaryTable:
    """Cosines and sines by position, float32 [positions, head_dim / 2], grown as longer contexts are met.

    Both are multiplied by the config's attention factor, as its scheme has it.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)
        self._attention_factor = config.attention_factor
        self._cos = torch.empty(0, head_dim // 2, device=device)
        self._sin = torch.empty(0, head_dim // 2, device=device)

    def lookup(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim / 2] of int64 `positions` [T], all of which are below `end`."""
        cos, sin = self.tables(end)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def tables(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [at least `end`, head_dim / 2], by position."""
        while self._cos.shape[0] < end:
            cos, sin = self._chunk(self._cos.shape[0])
            self._cos = torch.cat((self._cos, cos.to(self._cos.device)))
            self._sin = torch.cat((self._sin, sin.to(self._sin.device)))
        return self._cos, self._sin

    def _chunk(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Angles are rounded to float32, as the networks were trained; their cosines are then rounded from float64,
        # which leaves nothing to the vector width of the machine or the device.
        positions = torch.arange(start, start + CHUNK, dtype=torch.float32, device="cpu")
        angles = (positions[:, None] * self._frequencies).double()
        factor = self._attention_factor
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, heads, head_dim] turned by their positions' angles, in float32, rounded once to their own dtype."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
