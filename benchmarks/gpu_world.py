"""What the GPU benchmark runs on: the shapes, a pool of noise, a network of noise, and the backends that run here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's kernels are imported

from model.attention import varlen
from model.attention.base import Attention, Planes
from model.attention.choose import supports_triton
from model.config import ModelConfig, RopeConfig
from model.cuda_graphs import CudaCapture, DecodeGraphs
from model.inputs import StepInputs
from model.network import Network
from model.tensors import expected_tensors

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_positions=32768,
    tie_embeddings=False,
)
TINY = replace(
    LLAMA_8B, vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=512,
)  # fmt: skip

Span = tuple[int, int, int]
"""Request, first position, end."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run: the real thing, or the miniature."""

    config: ModelConfig
    dtype: torch.dtype
    block_size: int
    pool_tokens: int
    decode: tuple[tuple[int, int], ...]  # requests, context of each
    prefill: tuple[tuple[int, int], ...]  # tokens, context before them
    shapes: tuple[tuple[int, int, int], ...]  # compared: heads, K/V heads, head size
    dtypes: tuple[torch.dtype, ...]
    copied: int  # numbers in the bandwidth's buffer
    square: int  # side of the matrix rate's matrices
    compared: int  # positions whose bits are compared
    seconds: float  # per timing, about


FULL = Scale(
    config=LLAMA_8B,
    dtype=torch.bfloat16,
    block_size=16,
    pool_tokens=132 * 1024,
    decode=((1, 2048), (1, 32000), (16, 2048), (16, 8192), (64, 2048)),
    prefill=((512, 0), (2048, 0), (2048, 6144), (64, 8128)),
    shapes=((32, 8, 128), (9, 3, 64), (8, 2, 96)),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    copied=2**29,
    square=8192,
    compared=24,
    seconds=0.5,
)
SMOKE = Scale(
    config=TINY,
    dtype=torch.float32,
    block_size=16,
    pool_tokens=192,
    decode=((2, 20),),
    prefill=((20, 0),),
    shapes=((4, 2, 16),),
    dtypes=(torch.float32,),
    copied=2**16,
    square=64,
    compared=2,
    seconds=0.0,
)


class Pool:
    """Blocks for a network's K/V, filled with noise, and requests whose blocks lie anywhere in it but in block 0."""

    def __init__(self, config: ModelConfig, scale: Scale, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size, self.device = scale.block_size, device
        self.num_blocks = scale.pool_tokens // scale.block_size + 1
        shape = (self.num_blocks, config.num_layers, 2, config.num_kv_heads, scale.block_size, config.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device).normal_()
        self.planes: list[Planes] = [(self.blocks[:, n, 0], self.blocks[:, n, 1]) for n in range(config.num_layers)]

    def inputs(self, spans: list[Span], vocab_size: int = 2) -> StepInputs:
        """A step of these spans; logits of each one's last token. Requests of other numbers share no block."""
        width = max(-(-end // self.block_size) for _, _, end in spans)
        ids = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        tables = torch.stack([ids[request * width : (request + 1) * width] for request, _, _ in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        q_len = tuple(end - start for _, start, end in spans)
        row = torch.arange(len(spans)).repeat_interleave(torch.tensor(q_len))
        slots = tables[row, positions // self.block_size] * self.block_size + positions % self.block_size
        return StepInputs(
            token_ids=((positions * 7 + row) % vocab_size).to(self.device),
            positions=positions.to(self.device),
            slots=slots.to(self.device),
            q_len=q_len,
            kv_len=tuple(end for _, _, end in spans),
            block_tables=tables.to(torch.int32).to(self.device),
            logit_rows=(torch.tensor(q_len).cumsum(0) - 1).to(self.device),
        )


class RandomWeights(Mapping[str, torch.Tensor]):
    """A checkpoint that is made up while it is read."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = expected_tensors(config), dtype, device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(std=shape[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def backends(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> dict[str, Attention]:
    found: dict[str, Attention] = {}
    if device.type == "cpu" or supports_triton(device):
        from model.attention.triton_paged import TritonAttention

        processors = 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
        found["triton"] = TritonAttention(block_size, processors)
    if varlen.supports(device, dtype, head_dim):
        found["varlen"] = varlen.VarlenAttention(block_size)
    return found


def capture(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], object]]:
    if device.type == "cuda":
        return CudaCapture()

    def again(function: Callable[[], None]) -> Callable[[], object]:
        function()
        return function

    return again


def decode_graphs(network: Network, backend: Attention, pool: Pool, device: torch.device) -> DecodeGraphs:
    max_len = min(network.config.max_positions, (pool.num_blocks - 1) * pool.block_size)
    network.reserve(max_len)
    return DecodeGraphs(
        lambda inputs: network.forward(inputs, pool.planes, backend),
        capture(device),
        max_len=max_len,
        block_size=pool.block_size,
        vocab_size=network.config.vocab_size,
        device=device,
    )
