"""Rotary position embedding (Su et al. 2021), in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch

from model.config import RopeConfig

CHUNK = 4096
"""Positions per piece of the table: computed in pieces of one size, so that its bits never depend on its length."""


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2] on CPU.

    `linear` divides all of them (Chen et al. 2023); `llama3` divides the long wavelengths, keeps the short ones and
    interpolates between (Llama 3.1). A file's own `frequency_factors` divide one by one.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / config.theta**exponents
    if config.frequency_factors is not None:
        return plain / torch.tensor(config.frequency_factors, dtype=torch.float32, device="cpu")
    if config.kind == "none":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    raise ValueError(f"rotary scheme {config.kind!r} is not supported")


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    low, high, longest = config.low_freq_factor, config.high_freq_factor, config.original_max_positions
    wavelength = 2 * math.pi / plain
    smooth = (longest / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > longest / low, plain / config.factor, between)
    return torch.where(wavelength < longest / high, plain, scaled)


class RotaryTable:
    """Cosines and sines by position, float32 [positions, head_dim / 2], grown as longer contexts are met."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)
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
        return angles.cos().float(), angles.sin().float()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, heads, head_dim] turned by their positions' angles, in float32, rounded once to their own dtype."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
