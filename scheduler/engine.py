"""Engine: schedule -> run -> update, repeated. The only place where a scheduler, a cache and a network meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from cache.identity import CacheIdentity
from cache.pool import BlockPool
from cache.storage import KVStorage, PlaneShape, block_bytes
from cache.tree import PrefixTree
from model.attention.choose import choose_attention
from model.config import ModelConfig
from model.load import LoadedModel, load_model
from model.network import Network
from model.runner import Runner
from model.sampler import SampledToken, Sampler, SamplingFailure
from model.source import resolve
from scheduler.batch import Batch
from scheduler.config import EngineConfig, SchedulerConfig
from scheduler.inputs import flatten, sample_rows
from scheduler.machine import free_memory, usable_cores
from scheduler.messages import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    StepOutput,
    TokenLogprobs,
)
from scheduler.scheduler import RequestRefused, Sampled, Scheduler
from scheduler.sizing import choose_max_model_len, choose_num_blocks

log = logging.getLogger("pagekv.engine")

LAYOUT = "block/layer/kv/head/slot/dim"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Not thread-safe: whoever calls `step` calls everything else, between steps.

    Raises what loading and sizing raise (model.errors, scheduler.sizing.DoesNotFit), before anything is served.
    """

    def __init__(
        self, config: EngineConfig, *, progress: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        torch.set_num_threads(config.threads or usable_cores())
        device = _choose_device(config.device)
        dtype = _choose_dtype(config.dtype, device)
        loaded = load_model(resolve(config.model), dtype=dtype, device=device, progress=progress)
        self._clock = clock
        self._device = device
        self._build(config, loaded, dtype)

    def _build(self, config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype) -> None:
        model, size, device = loaded.config, config.block_size, self._device
        network = Network(model, loaded.weights, device=device, dtype=dtype)
        loaded.weights.clear()  # the network has fused copies of its own
        layers = _planes(model)
        bytes_a_block = block_bytes(size, layers, dtype)
        num_blocks = choose_num_blocks(config.num_blocks, config.kv_memory, _free_memory(device), bytes_a_block)
        max_model_len = choose_max_model_len(
            config.max_model_len, model.max_positions, model.sliding_window, num_blocks * size
        )
        self._storage = KVStorage(num_blocks, size, layers, dtype, device)
        attention = choose_attention(device, dtype, model.head_dim, size)
        self.runner = Runner(network, attention, self._storage.layers)
        self._sampler = Sampler(model.vocab_size)
        self.identity = CacheIdentity(
            model=loaded.digest,
            compute_dtype=str(dtype),
            kv_dtype=str(dtype),
            numerics=self.runner.numerics,
            layout=LAYOUT,
            block_size=size,
        )
        self._root = self.identity.root_hash()
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, size)
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            recovery=config.recovery,
            partial_reuse=config.partial_reuse,
        )
        self.scheduler = Scheduler(self.pool, self.tree, limits, model.eos_token_ids)
        name = str(dtype).removeprefix("torch.")
        self.info = EngineInfo(
            model_path=str(loaded.source.path),
            model_name=loaded.source.name,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            block_size=size,
            num_blocks=num_blocks,
            dtype=name,
            kv_dtype=name,
            block_bytes=bytes_a_block,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            recovery=str(config.recovery),
            partial_reuse=config.partial_reuse,
            device=str(device),
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: GenerationRequest) -> RequestOutput | None:
        """Queue a request; what could never run gets its terminal output here and now."""
        for index, token in enumerate(request.prompt_token_ids):
            if not 0 <= token < self.info.vocab_size:
                return _refusal(request, f"prompt token {index} is {token}, outside the vocabulary")
        try:
            self.scheduler.add(request, self._root, self._clock())
        except RequestRefused as error:
            return _refusal(request, str(error))
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        return self.scheduler.abort(request_id, self._clock())

    def abort_all(self) -> list[RequestOutput]:
        return self.scheduler.abort_all(self._clock())

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """One step: what it gave each request of its batch. A step that fails, fails its own requests only."""
        batch = self.scheduler.schedule(self._clock())
        if not batch.spans:
            return StepOutput((), self.stats())
        try:
            sampled = self._run(batch)
        except Exception as error:  # whatever it was, the other requests go on
            log.exception("a step of %d tokens failed", batch.num_tokens)
            outputs = self.scheduler.fail(batch, f"{type(error).__name__}: {error}", self._clock())
        else:
            outputs = self.scheduler.update(batch, sampled, self._clock())
        self._zero()
        return StepOutput(tuple(outputs), self.stats())

    def _run(self, batch: Batch) -> dict[str, Sampled]:
        self._storage.copy(
            [copy.source.block_id for copy in batch.copies], [copy.target.block_id for copy in batch.copies]
        )
        logits = self.runner.run(flatten(batch, self.info.block_size, self._device))
        rows = sample_rows(batch.sampled, self.info.eos_token_ids)
        chosen = self._sampler.sample(logits, rows)
        return {request.request_id: _as_sampled(choice) for request, choice in zip(batch.sampled, chosen, strict=True)}

    def _zero(self) -> None:
        for block_id, slot in self.scheduler.to_zero:
            self._storage.zero(block_id, slot)
        self.scheduler.to_zero.clear()

    def stats(self) -> EngineStats:
        """Gauges as they stand now, counters since start."""
        totals = self.scheduler.totals
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_in_use=self.pool.in_use,
            blocks_cached=self.pool.cached,
            blocks_total=len(self.pool.blocks),
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            prompt_tokens_reused=totals.reused,
            prompt_tokens_copied=totals.copied,
            prompt_tokens_pending=totals.pending,
            prompt_tokens_computed=totals.computed,
            recomputed_tokens=totals.recomputed_tokens,
            generation_tokens=totals.generation_tokens,
            evicted_blocks=self.pool.evictions,
            published_blocks=self.tree.published,
            hash_collisions=self.tree.collisions,
            steps=totals.steps,
            failed_steps=totals.failed_steps,
            step_tokens=totals.step_tokens,
        )


def _planes(model: ModelConfig) -> Sequence[Sequence[PlaneShape]]:
    """K and V per head, for every layer."""
    plane = PlaneShape(model.num_kv_heads, model.head_dim)
    return [(plane, plane)] * model.num_layers


def _refusal(request: GenerationRequest, error: str) -> RequestOutput:
    return RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)


def _as_sampled(choice: SampledToken | SamplingFailure) -> Sampled:
    if isinstance(choice, SamplingFailure):
        return Sampled(error=choice.message)
    if choice.logprob is None or choice.rank is None:
        return Sampled(choice.token_id)
    return Sampled(choice.token_id, TokenLogprobs(choice.token_id, choice.logprob, choice.rank, choice.top))


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it in hardware; elsewhere float32, which is faster there."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    units = torch.cpu.get_capabilities()
    return torch.bfloat16 if units.get("avx512_bf16") or units.get("amx_bf16") or units.get("bf16") else torch.float32


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
