"""The seam between the engine and the network: flat inputs in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.attention.base import Attention, Planes
from model.cuda_graphs import CudaCapture, DecodeGraphs
from model.inputs import StepInputs
from model.network import Network
from model.numerics import describe


class Runner:
    """A network with its attention backend and the planes of its cache, one entry per layer."""

    def __init__(self, network: Network, attention: Attention, planes: Sequence[Planes]) -> None:
        self._network = network
        self._attention = attention
        self._planes = tuple(planes)
        self._graphs = self._decode_graphs() if attention.capturable and network.device.type == "cuda" else None

    @property
    def numerics(self) -> str:
        """Names the arithmetic that K/V came from; part of the cache's identity."""
        return f"{self._attention.numerics}+{describe(self._network.device, self._network.dtype)}"

    def rouse(self) -> None:
        """A step is being prepared: nothing to do, as torch's threads cannot be woken ahead."""

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the positions of `inputs`, write their K/V, return float32 logits [N, vocab_size] of `logit_rows`."""
        if self._graphs is not None and self._graphs.accepts(inputs):
            logits = self._graphs.run(inputs)
            if logits is not None:
                return logits
        return self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._network.forward(inputs, self._planes, self._attention)

    def _decode_graphs(self) -> DecodeGraphs:
        num_blocks, _, block_size, _ = self._planes[0][0].shape
        config = self._network.config
        max_len = min(config.max_positions, num_blocks * block_size)
        self._network.reserve(max_len)
        return DecodeGraphs(
            self._forward,
            CudaCapture(),
            max_len=max_len,
            block_size=block_size,
            vocab_size=config.vocab_size,
            device=self._network.device,
        )
