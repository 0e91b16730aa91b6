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
from model.cpu.weights import PackedModel, WeightForm
from model.load import LoadedModel
from model.network import Network
from model.runner import Runner
from scheduler.config import EngineConfig
from scheduler.machine import free_memory

log = logging.getLogger("pagekv.engine")

FORMS = {"auto": WeightForm.BOTH, "quantized": WeightForm.QUANTIZED, "bfloat16": WeightForm.DENSE}

SPARE = 2
"""Unpacked weights are kept beside quantized ones only where so many times their bytes are free."""

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

    def network(self, loaded: LoadedModel, config: EngineConfig, threads: int) -> Network | CRunner:
        """The weights, packed as they are computed with; those of `loaded` are let go.

        Raises BackendUnavailable for quantized weights of a model that has none.
        """
        if self.c is not None:
            return self._c_runner(self.c, loaded, config, threads)
        network = Network(loaded.config, loaded.weights, device=self.device, dtype=self.dtype)
        loaded.weights.clear()  # the network has fused copies of its own
        return network

    def _c_runner(self, c: CBackend, loaded: LoadedModel, config: EngineConfig, threads: int) -> CRunner:
        form = FORMS[config.weights]
        if form is WeightForm.BOTH and _bytes(loaded) * SPARE > free_memory():
            form = WeightForm.QUANTIZED
        weights = PackedModel(loaded.config, loaded.weights, loaded.quantized, form, config.block_size, c.library)
        if config.weights == "quantized" and not weights.has_quantized:
            raise BackendUnavailable(f"{loaded.source.path} has no quantized matrices that the C backend can read.")
        # What is left to torch is small: its threads would only be in the way of the library's.
        torch.set_num_threads(1)
        runner = CRunner(loaded.config, weights, c.library, c.variant, threads=threads)
        if form is WeightForm.BOTH and weights.has_quantized:
            rows = runner.measure_quantized(config.block_size, self.dtype)
            if rows:
                log.info("steps of up to %d tokens read the file's quantized weights", rows)
            else:
                log.info("unpacked weights are the faster ones here for steps of any size")
        return runner

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
        _refuse_weights(config, "torch computes")
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
        _refuse_weights(config, str(why))
    return Backend(_torch_dtype(config.dtype, device), device, None)


def _refuse_weights(config: EngineConfig, why: str) -> None:
    if config.weights == "quantized":
        raise BackendUnavailable(f"Only the C backend computes with quantized weights, and it is not used: {why}.")


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it in hardware; elsewhere float32, which is faster in torch."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    units = torch.cpu.get_capabilities()
    return torch.bfloat16 if units.get("avx512_bf16") or units.get("amx_bf16") or units.get("bf16") else torch.float32


def _bytes(loaded: LoadedModel) -> int:
    return sum(tensor.nbytes for tensor in loaded.weights.values())
