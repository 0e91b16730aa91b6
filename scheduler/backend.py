"""What computes: the C backend where it can, else the torch network; and the cache's layout that it wants."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.storage import KVStorage, PlaneShape, SlotOrder
from model.attention.choose import choose_attention
from model.config import ModelConfig
from model.cpu.choose import CBackend, NotApplicable, check_model, find_backend
from model.cpu.runner import CRunner
from model.load import LoadedModel
from model.network import Network
from model.runner import Runner
from scheduler.config import EngineConfig

log = logging.getLogger("pagekv.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BackendUnavailable(Exception):
    """The backend that was asked for cannot compute this model here."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A choice for one model: `c` is None for the torch network."""

    dtype: torch.dtype
    device: torch.device
    c: CBackend | None

    @property
    def name(self) -> str:
        return "torch" if self.c is None else "c"

    @property
    def layout(self) -> str:
        """Names where things lie within a block; part of the cache's identity."""
        return "block/layer/kv/head/" + ("slot/dim" if self.c is None else "tile/word")

    def planes(self, model: ModelConfig) -> Sequence[Sequence[PlaneShape]]:
        """K and V per head, for every layer."""
        orders = (SlotOrder.ROWS,) * 2 if self.c is None else (SlotOrder.COLUMNS, SlotOrder.PAIRS)
        return [[PlaneShape(model.num_kv_heads, model.head_dim, order) for order in orders]] * model.num_layers

    def network(self, loaded: LoadedModel, block_size: int, threads: int) -> Network | CRunner:
        """The weights, packed as they are computed with; those of `loaded` are let go."""
        if self.c is not None:
            return CRunner(
                loaded.config, loaded.weights, self.c.library, self.c.variant, block_size=block_size, threads=threads
            )
        network = Network(loaded.config, loaded.weights, device=self.device, dtype=self.dtype)
        loaded.weights.clear()  # the network has fused copies of its own
        return network

    def runner(self, network: Network | CRunner, storage: KVStorage, block_size: int) -> Runner | CRunner:
        """`network` at work on the blocks of `storage`."""
        if isinstance(network, CRunner):
            network.attach(storage.blocks)
            return network
        attention = choose_attention(self.device, self.dtype, network.config.head_dim, block_size)
        return Runner(network, attention, storage.layers)


def choose_backend(config: EngineConfig, model: ModelConfig, device: torch.device) -> Backend:
    """Raises BackendUnavailable if what was asked for by name is not to be had."""
    if config.backend == "torch":
        return Backend(_torch_dtype(config.dtype, device), device, None)
    dtype = torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]
    try:
        check_model(model, config.block_size)
        return Backend(dtype, device, find_backend(dtype, device))
    except NotApplicable as why:
        if config.backend == "c":
            raise BackendUnavailable(f"The C backend cannot be used: {why}.") from why
        if device.type == "cpu":
            log.info("computing with torch, as the C backend cannot be used: %s", why)
    return Backend(_torch_dtype(config.dtype, device), device, None)


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it in hardware; elsewhere float32, which is faster in torch."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    units = torch.cpu.get_capabilities()
    return torch.bfloat16 if units.get("avx512_bf16") or units.get("amx_bf16") or units.get("bf16") else torch.float32
