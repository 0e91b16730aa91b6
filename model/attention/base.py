"""The one interface between the network and its paged K/V.

Per layer the network calls `write` with the planes it has just computed, then `attend`. Because `write` has put the
K/V of *all* rows of the step in place before any row attends, a decode token, a prompt's chunk and a repaired gap need
no special case: row t of a span attends to positions 0..position[t], wherever their K/V came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from model.inputs import StepInputs

Planes = tuple[torch.Tensor, ...]
"""The cache of one layer: for K and V per head, two strided views [num_blocks, num_kv_heads, block_size, head_dim]."""


class Attention(Protocol):
    """A backend. `numerics` names its arithmetic: two backends or versions with other bits have other names.

    `capturable`: a CUDA graph can hold a step of single tokens. Then a slot of -1 is not written, and `prepare` and
    `attend` read from the tensors of their inputs alone; `q_len` is all ones, and of `kv_len` only the greatest and the
    sum are read, which may be more than what the tensors hold.
    """

    numerics: str
    capturable: bool

    def prepare(self, inputs: StepInputs) -> None:
        """Called once a step, before the first layer: plan whatever all layers share."""

    def write(self, planes: Planes, values: Sequence[torch.Tensor]) -> None:
        """Put `values` (one per plane, [T, num_kv_heads, head_dim]) into the slots of the prepared step."""

    def attend(self, planes: Planes, query: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> [T, num_heads, head_dim], causal by position, scaled by head_dim**-0.5."""
