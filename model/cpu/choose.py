"""Whether the C backend computes here, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.cpu.library import PANEL, TILE, Library, NotBuilt, find_library

HEAD_DIMS = (64, 96, 128)
MOST_SLOTS = 128  # of a block
_WORDS = {torch.bfloat16: "bf16", torch.float32: "f32"}


class NotApplicable(Exception):
    """The C backend does not compute this here; the message says why."""


@dataclass(frozen=True, slots=True)
class CBackend:
    """A library that this processor can run. `variant` is its instructions and word, such as avx2_bf16."""

    library: Library
    variant: str


def find_backend(dtype: torch.dtype, device: torch.device) -> CBackend:
    """The fastest library for this processor. Raises NotApplicable."""
    if device.type != "cpu":
        raise NotApplicable(f"it computes on the CPU, not on {device.type}")
    word = _WORDS.get(dtype)
    if word is None:
        raise NotApplicable(f"it computes in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}")
    instructions = _instructions(torch.cpu.get_capabilities(), word)
    if instructions is None:
        raise NotApplicable("this processor has no AVX2")
    variant = f"{instructions}_{word}"
    try:
        return CBackend(Library(find_library(variant)), variant)
    except NotBuilt as error:
        raise NotApplicable(str(error)) from error


def check_model(config: ModelConfig, block_size: int) -> None:
    """Raises NotApplicable for a network or blocks whose shapes are not what the library is written for."""
    if config.head_dim not in HEAD_DIMS:
        raise NotApplicable(f"it has heads of 64, 96 or 128 dimensions, the model has {config.head_dim}")
    if config.hidden_size % PANEL:
        raise NotApplicable(
            f"it wants a hidden size that is a multiple of {PANEL}, the model's is {config.hidden_size}"
        )
    if block_size % TILE or block_size > MOST_SLOTS:
        raise NotApplicable(f"it has blocks of 16, 32, 64 or 128 tokens, not {block_size}")


def _instructions(units: Mapping[str, object], word: str) -> str | None:
    if all(units.get(unit) for unit in ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")):
        if word == "f32":
            return "avx512"
        if units.get("avx512_bf16"):
            return "avx512bf16"
    return "avx2" if all(units.get(unit) for unit in ("avx2", "fma3", "f16c")) else None
