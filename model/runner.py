"""The seam between the engine and the network: flat inputs in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.attention.base import Attention, Planes
from model.inputs import StepInputs
from model.network import Network
from model.numerics import describe


class Runner:
    """A network with its attention backend and the planes of its cache, one entry per layer."""

    def __init__(self, network: Network, attention: Attention, planes: Sequence[Planes]) -> None:
        self._network = network
        self._attention = attention
        self._planes = tuple(planes)

    @property
    def numerics(self) -> str:
        """Names the arithmetic that K/V came from; part of the cache's identity."""
        return f"{self._attention.numerics}+{describe(self._network.device, self._network.dtype)}"

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the positions of `inputs`, write their K/V, return float32 logits [N, vocab_size] of `logit_rows`."""
        return self._network.forward(inputs, self._planes, self._attention)
