"""Engine: schedule -> run -> update, repeated. The only place where a scheduler, a cache and a network meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from cache.hashing import BlockHasher
from cache.identity import CacheIdentity
from cache.integrity import Integrity
from cache.pool import BlockPool
from cache.storage import KVStorage, block_bytes
from cache.tree import PrefixTree
from model.config import ModelConfig
from model.errors import AdapterError
from model.load import LoadedModel, OpenedModel, open_model
from model.lora import load_adapter
from model.sampler import SampledToken, Sampler, SamplingFailure
from model.source import resolve
from scheduler.adapters import Adapter, Adapters
from scheduler.backend import Backend, choose_backend
from scheduler.batch import Batch
from scheduler.changes import CacheChanges
from scheduler.commands import (
    AdapterInfo,
    CacheTarget,
    ChangeCache,
    Command,
    CommandRefused,
    ListAdapters,
    LoadAdapter,
    PlanPrompt,
    PrepareGrammar,
    SetVocabulary,
    UnloadAdapter,
)
from scheduler.config import EngineConfig, SchedulerConfig
from scheduler.guided import Guide, Guides
from scheduler.identities import Identities, Root
from scheduler.inputs import flatten, sample_rows, scored_tokens
from scheduler.machine import free_memory, return_freed_memory, usable_cores
from scheduler.masks import PendingMasks
from scheduler.messages import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from scheduler.request import Request
from scheduler.sampling_defaults import SamplingDefaults
from scheduler.scheduler import RequestRefused, Sampled, Scheduler
from scheduler.sizing import choose_max_model_len, choose_num_blocks

log = logging.getLogger("pagekv.engine")

_NO_PARAMS = SamplingParams(max_tokens=1, seed=0)


class Engine:
    """Not thread-safe: whoever calls `step` calls everything else, between steps.

    Raises what loading and sizing raise (model.errors, scheduler.sizing.DoesNotFit), before anything is served.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        found: Callable[[str], None] = lambda path: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`found` is told where the model lies before its weights are read."""
        threads = config.threads or usable_cores()
        torch.set_num_threads(threads)
        self._clock = clock
        self._device = _choose_device(config.device)
        opened = open_model(resolve(config.model))
        opened = opened.settled(config.max_model_len or opened.config.max_positions)
        model = opened.config
        sampling = _sampling_defaults(config, opened)
        found(str(opened.source.path))
        backend = choose_backend(config, model, self._device)
        dtype = backend.dtype
        loaded = opened.load(dtype=dtype, device=self._device, progress=progress)
        network = backend.network(loaded, config, threads)
        return_freed_memory()  # what loading took; the pool's default size is a share of the free memory
        planes = backend.planes(model)
        num_blocks = choose_num_blocks(
            config.num_blocks,
            config.kv_memory,
            _free_memory(self._device),
            block_bytes(config.block_size, planes, dtype),
        )
        limits = _limits(config, model, num_blocks)
        self._storage = KVStorage(num_blocks, config.block_size, planes, dtype, self._device)
        self.runner = backend.runner(network, self._storage, config.block_size)
        self._sampler = Sampler(model.vocab_size)
        self.guides = Guides(model.vocab_size, model.eos_token_ids)
        self.info = _info(config, loaded, limits, self._storage, backend, sampling)
        self._set_up_cache(config, loaded, limits, backend)
        self._adapters = Adapters(lambda path: load_adapter(Path(path), model, dtype=dtype, device=self._device))
        for name, path in config.adapters:
            self._adapters.load(name, path)

    def _set_up_cache(
        self, config: EngineConfig, loaded: LoadedModel, limits: SchedulerConfig, backend: Backend
    ) -> None:
        self.identity = CacheIdentity(
            model=loaded.digest,
            compute_dtype=str(backend.dtype),
            kv_dtype=str(backend.dtype),
            numerics=self.runner.numerics,
            layout=backend.layout,
            block_size=config.block_size,
        )
        self.pool = BlockPool(self.info.num_blocks)
        self.tree = PrefixTree(self.pool, config.block_size, BlockHasher(config.hash_bits))
        self._identities = Identities(self.identity, self.tree.has_root)
        self._integrity = Integrity(self.pool, self.tree, self._storage.checksum, self._storage.is_finite)
        self._scrub_rate = config.scrub_rate
        self._scrubbed = self._clock()
        self.scheduler = Scheduler(self.pool, self.tree, limits, loaded.config.eos_token_ids, self._integrity)
        self._changes = CacheChanges(self.pool, self.tree, self.scheduler, self._storage.block_bytes)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: GenerationRequest) -> RequestOutput | None:
        """Queue a request; what could never run gets its terminal output here and now."""
        for index, token in enumerate(request.prompt_token_ids):
            if not 0 <= token < self.info.vocab_size:
                return _refusal(request, f"prompt token {index} is {token}, outside the vocabulary")
        for field, token in request.params.named_tokens():
            if not 0 <= token < self.info.vocab_size:
                return _refusal(request, f"{field} names token {token}, outside the vocabulary")
        if request.params.prompt_logprobs is not None:  # a reused position has no logits
            request = replace(request, cache=replace(request.cache, read=False))
        try:
            root, adapter = self._root(request), self._adapter(request)
            weights = None if adapter is None else adapter.weights
            others = [(other.hash, reason) for other, reason in self._identities.others(root)] if request.report else ()
            guide = None if request.grammar is None else self.guides.open(request.grammar)
            self.scheduler.add(request, root.hash, self._clock(), adapter=weights, guide=guide, others=others)
        except (RequestRefused, CommandRefused) as error:
            return _refusal(request, str(error))
        return None

    def _root(self, request: GenerationRequest) -> Root:
        """Where the request belongs in the cache. Raises CommandRefused for an adapter that is not loaded."""
        adapter = self._adapter(request)
        version = None if adapter is None else adapter.version
        return self._identities.root(request.adapter, version, request.cache_salt)

    def _adapter(self, request: GenerationRequest) -> Adapter | None:
        return None if request.adapter is None else self._adapters.get(request.adapter)

    def abort(self, request_id: str) -> RequestOutput | None:
        return self.scheduler.abort(request_id, self._clock())

    def abort_all(self) -> list[RequestOutput]:
        return self.scheduler.abort_all(self._clock())

    # -- commands -----------------------------------------------------------------------------------------------------

    def command(self, command: Command) -> object:
        """Carry out what an operator asks, between steps; each command names its answer. Raises CommandRefused."""
        match command:
            case ChangeCache(operation, target):
                effect = self._changes.change(operation, target, self._roots_of(target))
                self._zero()
                return effect
            case PlanPrompt(request, reveal):
                root = self._root(request)
                others = [(other.hash, reason) for other, reason in self._identities.others(root)]
                return self.scheduler.plan(request, root.hash, others=others, reveal=reveal)
            case LoadAdapter(name, path):
                return self._load_adapter(name, path)
            case UnloadAdapter(name):
                return self._adapters.unload(name).info
            case ListAdapters():
                return tuple(adapter.info for adapter in self._adapters)
            case SetVocabulary() | PrepareGrammar():
                return self.guides.command(command).result()
        raise CommandRefused(f"unknown command {command!r}")

    def _load_adapter(self, name: str, path: str) -> AdapterInfo:
        try:
            return self._adapters.load(name, path).info
        except AdapterError as error:
            raise CommandRefused(str(error), "lora_path") from error

    def _roots_of(self, target: CacheTarget) -> list[Root]:
        """The roots a target is confined to."""
        if target.prompt is not None:
            return [self._root(GenerationRequest("", target.prompt, _NO_PARAMS, 0, target.cache_salt, target.adapter))]
        roots = list(self._identities)
        if target.adapter is not None:
            roots = [root for root in roots if root.adapter == target.adapter]
        elif target.cache_salt is not None:
            roots = [root for root in roots if root.identity.salt == target.cache_salt]
        return list({root.hash: root for root in roots}.values())  # two names of one adapter share a root

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, before_network: Callable[[], None] = lambda: None) -> StepOutput:
        """One step: what it gave each request of its batch. A step that fails, fails its own requests only.

        `before_network` is called, if anything is computed, when all is ready for the network: while that runs, other
        threads have the interpreter.
        """
        self.runner.rouse()
        said = self.scrub()
        batch = self.scheduler.schedule(self._clock())
        self._zero()  # what an abort or a preemption let go of, before anyone writes there
        if not batch.spans:
            return StepOutput(tuple(said), self.stats())
        try:
            sampled, scored = self._run(batch, before_network)
        except Exception as error:  # whatever it was, the other requests go on
            log.exception("a step of %d tokens failed", batch.num_tokens)
            outputs = self.scheduler.fail(batch, f"{type(error).__name__}: {error}", self._clock())
        else:
            outputs = self.scheduler.update(batch, sampled, self._clock(), scored)
            self._integrity.sign(self.scheduler.totals.steps)
        self._zero()
        return StepOutput((*said, *outputs), self.stats())

    def _run(
        self, batch: Batch, before_network: Callable[[], None]
    ) -> tuple[dict[str, Sampled], dict[str, list[TokenLogprobs]]]:
        """Returns what was sampled, and the log-probabilities of prompt tokens, by request id."""
        self._storage.copy(
            [copy.source.block_id for copy in batch.copies], [copy.target.block_id for copy in batch.copies]
        )
        pending = self._start_masks(batch)
        inputs = flatten(batch, self.info.block_size, self._device)
        before_network()
        logits = self.runner.run(inputs)
        prompt_tokens = scored_tokens(batch)
        scored = self._sampler.score(
            logits[: len(prompt_tokens)],
            [request.tokens[index] for request, index in prompt_tokens],
            [request.params.prompt_logprobs or 0 for request, _ in prompt_tokens],
        )
        guided = pending.collect()
        self.guides.waited += pending.waited
        rows = sample_rows(batch.sampled, self.info.eos_token_ids, guided.masks)
        chosen = self._sampler.sample(logits[len(prompt_tokens) :], rows)
        ids = [request.request_id for request in batch.sampled]
        sampled = {id_: _as_sampled(choice) for id_, choice in zip(ids, chosen, strict=True)}
        sampled |= {id_: Sampled(error=fault, unmeetable=True) for id_, fault in guided.faults.items()}
        sampled |= {id_: Sampled(error=late, busy=True) for id_, late in guided.late.items()}
        return sampled, _by_request(prompt_tokens, scored)

    def _start_masks(self, batch: Batch) -> PendingMasks:
        """What the grammars of guided requests allow next: known before the network is, and computed beside it."""
        return self.guides.start(
            (request.request_id, request.guide, request.tokens[request.prompt_len + request.guide.seen :])
            for request in batch.sampled
            if isinstance(request.guide, Guide)
        )

    def scrub(self) -> list[RequestOutput]:
        """Check as many published blocks as are due by now. Damage is contained and counted; returns the ends of
        requests that cannot be saved."""
        now, step = self._clock(), self.scheduler.totals.steps
        due = int((now - self._scrubbed) * self._scrub_rate)
        if due == 0:
            return []
        self._scrubbed = now
        outputs: list[RequestOutput] = []
        for block in self._integrity.scrub(due, step):
            log.error("block %d is corrupt: its checksum is not that of its publication", block.block_id)
            outputs += self.scheduler.corrupt(self._integrity.taint(block), now)
            self._zero()
        return outputs

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
            checked_blocks=self._integrity.checked,
            corrupt_blocks=self._integrity.failures,
            pinned_blocks=self.pool.pinned,
            steps=totals.steps,
            failed_steps=totals.failed_steps,
            step_tokens=totals.step_tokens,
        )


def _limits(config: EngineConfig, model: ModelConfig, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=choose_max_model_len(
            config.max_model_len, model.max_positions, model.sliding_window, num_blocks * config.block_size
        ),
        recovery=config.recovery,
        partial_reuse=config.partial_reuse,
        pin_share=config.pin_share,
    )


def _sampling_defaults(config: EngineConfig, opened: OpenedModel) -> SamplingDefaults:
    """Raises BadDefault."""
    advice = opened.advice if config.generation_config == "auto" else {}
    SamplingDefaults.of(advice, f"the sampling defaults of {opened.source.path}")  # so that an error names the culprit
    return SamplingDefaults.of({**advice, **config.sampling_override}, "--override-generation-config")


def _info(
    config: EngineConfig,
    loaded: LoadedModel,
    limits: SchedulerConfig,
    storage: KVStorage,
    backend: Backend,
    sampling: SamplingDefaults,
) -> EngineInfo:
    name = str(backend.dtype).removeprefix("torch.")
    return EngineInfo(
        model_path=str(loaded.source.path),
        model_name=loaded.source.name,
        vocab_size=loaded.config.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=loaded.config.eos_token_ids,
        block_size=config.block_size,
        num_blocks=storage.num_blocks,
        dtype=name,
        kv_dtype=name,
        block_bytes=storage.block_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        recovery=str(limits.recovery),
        partial_reuse=limits.partial_reuse,
        device=str(storage.device),
        backend=backend.name,
        sampling=sampling,
    )


def _refusal(request: GenerationRequest, error: str) -> RequestOutput:
    return RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)


def _by_request(tokens: list[tuple[Request, int]], rows: list[SampledToken]) -> dict[str, list[TokenLogprobs]]:
    scores: dict[str, list[TokenLogprobs]] = {}
    for (request, _), row in zip(tokens, rows, strict=True):
        scores.setdefault(request.request_id, []).append(_as_logprobs(row))
    return scores


def _as_logprobs(token: SampledToken) -> TokenLogprobs:
    assert token.logprob is not None and token.rank is not None
    return TokenLogprobs(token.token_id, token.logprob, token.rank, token.top)


def _as_sampled(choice: SampledToken | SamplingFailure) -> Sampled:
    if isinstance(choice, SamplingFailure):
        return Sampled(error=choice.message, is_broken=choice.is_broken, unmeetable=not choice.is_broken)
    return Sampled(choice.token_id, None if choice.logprob is None else _as_logprobs(choice))


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
