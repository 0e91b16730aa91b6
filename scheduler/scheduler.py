"""Scheduler: which positions each step computes, and what becomes of the requests after it.

Pure decisions: no tensors, no I/O, and the clock is an argument. `schedule` -> (the engine runs the batch) ->
`update` or `fail`, one step at a time; abort, drop and invalidate come between steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cache.block import Block, BlockId
from cache.hashing import encode_tokens
from cache.identity import BlockHash
from cache.integrity import Integrity, Taint
from cache.match import Match
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.reason import MissReason
from cache.tree import PrefixTree
from scheduler.batch import Batch, Copy
from scheduler.config import SchedulerConfig
from scheduler.messages import CacheReport, FinishReason, GenerationRequest, RequestOutput, TokenLogprobs
from scheduler.report import report, settled
from scheduler.request import Request, RequestStatus
from scheduler.tables import BlockTables
from scheduler.totals import Totals

MAX_SCORED = 256
"""Positions that a request whose prompt is scored computes in one step: each gives a long row of logits."""


class RequestRefused(Exception):
    """A request that could never run: nothing was allocated for it."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for one request of a batch; or, with `error`, why it could not: its logits, and so its
    K/V, are `is_broken`; the request is `unmeetable`, as it leaves nothing to choose from; the machine was `busy`."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_broken: bool = False
    unmeetable: bool = False
    busy: bool = False


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


class Scheduler:
    """Waiting and running requests, each list in the order they are served: by priority, then by arrival.

    `to_zero` collects (block, first slot) that a failed request may have left non-finite values in; the engine zeroes
    them before the next step.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        integrity: Integrity | None = None,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.totals = Totals()
        self._requests: dict[str, Request] = {}
        self._pool = pool
        self._tree = tree
        self._config = config
        self._eos = frozenset(eos_token_ids)
        self._integrity = integrity
        self._tables = BlockTables(pool, tree, config)
        self.to_zero: list[tuple[BlockId, int]] = self._tables.to_zero
        self._arrivals = 0

    # -- arrivals and departures --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self,
        message: GenerationRequest,
        identity: BlockHash,
        now: float,
        *,
        adapter: object = None,
        guide: object = None,
        others: Sequence[tuple[BlockHash, MissReason]] = (),
    ) -> None:
        """Queue a request under an identity's root. `adapter` and `guide` are kept for the engine; `others` are roots
        that may explain a miss. Raises RequestRefused for one that could never run; nothing is kept of it."""
        self._refuse_unfit(message)
        request = Request(message, identity, now, self._arrivals, adapter)
        request.others = list(others)
        request.first = self._first_choice(request, message.after)
        request.guide = guide
        self._arrivals += 1
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def _first_choice(self, request: Request, name: str | None) -> Request | None:
        """The request of this name, if it has the same prompt under the same identity."""
        first = None if name is None else self._requests.get(name)
        if first is None or first.identity != request.identity:
            return None
        return first if first.tokens[: first.prompt_len] == request.tokens else None

    def _refuse_unfit(self, message: GenerationRequest) -> None:
        wanted = len(message.prompt_token_ids) + message.params.max_tokens
        if not message.prompt_token_ids:
            raise RequestRefused("the prompt is empty")
        if message.params.max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, not {message.params.max_tokens}")
        if wanted > self._config.max_model_len:
            raise RequestRefused(
                f"{len(message.prompt_token_ids)} prompt tokens and max_tokens {message.params.max_tokens} exceed the "
                f"maximum of {self._config.max_model_len} tokens a request"
            )
        if message.request_id in self._requests:
            raise RequestRefused(f"request id {message.request_id!r} is in use")

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request in whatever state it is. None if there is no such request (it may have just ended)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT, now)

    def abort_all(self, now: float) -> list[RequestOutput]:
        return [self._finish(request, FinishReason.ABORT, now) for request in list(self._requests.values())]

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """The next step: running requests first, then as many waiting ones as there is room for."""
        self._tables.expire(now)
        batch = Batch()
        preemptions = self.totals.preemptions
        for request in list(self.running):
            if batch.num_tokens >= self._config.max_num_batched_tokens:
                break
            if request.status is RequestStatus.RUNNING and self._make_room(request, batch, now):
                self._plan(request, batch)
        if self.totals.preemptions == preemptions:
            self._admit_waiting(batch, now)
        return batch

    def _make_room(self, request: Request, batch: Batch, now: float) -> bool:
        """Give the request the blocks it needs to go on, preempting the newest where there are none. False if the
        request itself was preempted."""
        copies: list[Copy] = []
        for index in self._tables.missing(request):
            while (more := self._tables.fill(request, index, break_pins=len(self.running) == 1)) is None:
                victim = self.running[-1]
                self._preempt(victim, now)
                if victim is request:
                    self._tables.free_sources(copies)
                    return False
            copies += more
        batch.add_copies(copies)
        return True

    def _preempt(self, request: Request, now: float) -> None:
        request.preemptions += 1
        self.totals.preemptions += 1
        self._send_back(request, now, keep_tails=True)

    def _send_back(self, request: Request, now: float, *, keep_tails: bool) -> None:
        """A running request waits again, without blocks, in its old place."""
        self.running.remove(request)
        self._tables.release(request, now, keep_tails=keep_tails)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_rank)

    def _admit_waiting(self, batch: Batch, now: float) -> None:
        held = 0  # requests at the head that wait for another one's prefill, which is ahead of them
        while (
            held < len(self.waiting)
            and len(self.running) < self._config.max_num_seqs
            and batch.num_tokens < self._config.max_num_batched_tokens
        ):
            request = self.waiting[held]
            if request.waits:
                held += 1
                continue
            copies = self._tables.admit(request, now, break_pins=not self.running)
            if copies is None:
                break
            del self.waiting[held]
            insort(self.running, request, key=_rank)
            request.status = RequestStatus.RUNNING
            if request.first_scheduled is None:
                request.first_scheduled = now
            batch.add_copies(copies)
            self._plan(request, batch)

    def _plan(self, request: Request, batch: Batch) -> None:
        """Add the request's spans, lowest positions first, as far as the budget goes. Slots that another request of
        this batch will have written count as valid: all K/V of a layer are written before the layer attends."""
        size = self._tree.block_size
        limit = self._config.max_num_batched_tokens
        if request.params.prompt_logprobs is not None:
            limit = min(limit, batch.num_tokens + MAX_SCORED)
        for index in request.open:
            block = request.table[index]
            assert block is not None
            budget = limit - batch.num_tokens
            start = index * size + batch.valid_slots(block)
            wanted = min((index + 1) * size, len(request.tokens))
            end = min(wanted, start + budget)
            if start < end:
                batch.add(request, start, end)
                batch.planned[block] = end - index * size
            if end < wanted:
                return
        batch.sampled.append(request)

    # -- update -------------------------------------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        sampled: Mapping[str, Sampled],
        now: float,
        scored: Mapping[str, Sequence[TokenLogprobs]] | None = None,
    ) -> list[RequestOutput]:
        """The step succeeded: publish what it filled, append what it sampled, end what is done. `sampled` and `scored`,
        the log-probabilities of prompt tokens, are by request id."""
        for request in batch.requests:
            request.prompt_logprobs += (scored or {}).get(request.request_id, ())
        for copy in batch.copies:
            copy.target.copied_from(copy.source, self.totals.steps + 1)
        self._settle(batch)
        for block, valid in batch.planned.items():
            block.written = valid
        self._account(batch)
        outputs = []
        for request in batch.sampled:
            choice = sampled[request.request_id]
            if choice.error is not None and choice.is_broken:
                outputs.append(self._distrust(request, choice.error, now))
        for request in batch.requests:
            if request.status is RequestStatus.RUNNING:
                self._tables.publish_full(request, now)
        for request in batch.sampled:
            if request.status is RequestStatus.RUNNING:
                outputs.append(self._append(request, sampled[request.request_id], now))
        return outputs

    def _settle(self, batch: Batch) -> None:
        """The step is over: its copies need their sources no longer."""
        self._tables.free_sources(batch.copies)
        self.totals.steps += 1

    def _account(self, batch: Batch) -> None:
        self.totals.step_tokens = batch.num_tokens
        for span in batch.spans:
            request = span.request
            if request.first_written is None or span.start < request.first_written:
                request.first_written = span.start
            in_prompt = max(0, min(span.end, request.prompt_len) - span.start)
            again = in_prompt if request.usage is not None else request.ledger.computed(span.start, span.end)
            beyond = max(span.start, request.prompt_len)
            again += max(0, min(span.end, request.high) - beyond)
            request.high = max(request.high, span.end)
            self.totals.recomputed_tokens += again

    def _append(self, request: Request, sampled: Sampled, now: float) -> RequestOutput:
        if sampled.error is not None:
            failed = self._finish(request, FinishReason.ERROR, now, sampled.error)
            return replace(failed, unmeetable=sampled.unmeetable, busy=sampled.busy)
        first = request.usage is None
        if first:
            request.usage = request.ledger.usage()
            request.first_token = now
            self.totals.prefilled(request.usage)
            if request.report is not None:
                request.report = settled(request.report, request.usage, request.ledger.computed_ranges())
        inter_token = None if request.last_token is None else now - request.last_token
        request.last_token = now
        request.append(sampled.token_id)
        self.totals.generation_tokens += 1
        output = RequestOutput(
            request.request_id,
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            prompt_logprobs=tuple(request.prompt_logprobs)
            if first and request.params.prompt_logprobs is not None
            else (),
            usage=request.usage if first else None,
            report=request.report if first else None,
            time_to_first_token=now - request.arrival if first else None,
            inter_token=inter_token,
            num_generated=request.num_generated,
        )
        reason, stop_token = self._end_of(request, sampled.token_id)
        if reason is None:
            return output
        end = self._finish(request, reason, now)
        return replace(output, finish_reason=reason, stop_token_id=stop_token, times=end.times)

    def _end_of(self, request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = request.params
        if request.num_generated >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos and not params.ignore_eos:
                return FinishReason.STOP, None
        full = len(request.tokens) >= self._config.max_model_len
        if request.num_generated >= params.max_tokens or full:
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> RequestOutput:
        """The one way a request ends: its blocks are let go and it gets its terminal output."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._tables.release(request, now, keep_tails=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        return RequestOutput(
            request.request_id,
            finish_reason=reason,
            times=request.times(now),
            num_generated=request.num_generated,
            error=error,
        )

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, batch: Batch, error: str, now: float) -> list[RequestOutput]:
        """The step failed: so do its requests, and only they. What it may have written is zeroed before reuse."""
        self._settle(batch)
        self.totals.failed_steps += 1
        written = [(block, block.written) for block in batch.planned]
        outputs = [self._finish(request, FinishReason.ERROR, now, error) for request in batch.requests]
        self.to_zero += [(block.block_id, valid if block.ref_count else 0) for block, valid in written]
        return outputs

    def _distrust(self, request: Request, error: str, now: float) -> RequestOutput:
        """Logits that are not finite come from K/V that are not: forget all that this request computed, and what it
        found in the cache of that kind, so that the next one does not fail for it too."""
        first = min((request.first_written or 0) // self._tree.block_size, self._first_unsound(request))
        suspects = [block for block in request.table[first:] if block is not None]
        sources = {source.node for block in suspects for source in block.lineage.sources}
        if first < len(request.chain):
            self.invalidate(request.chain[first])
        for source in sources:
            if source is not None and source.block is not None and not self._is_sound(source.block):
                self.drop(source, MissReason.CORRUPT)
        self._tables.suspect(block for block in suspects if not block.published)
        return self._finish(request, FinishReason.ERROR, now, error)

    def _first_unsound(self, request: Request) -> int:
        """The index of the first block of the request that holds what no working network computes."""
        for index, block in enumerate(request.table):
            if block is not None and not self._is_sound(block):
                return index
        return len(request.table)

    def _is_sound(self, block: Block) -> bool:
        return self._integrity is None or self._integrity.is_sound(block)

    # -- what acts on a running cache ---------------------------------------------------------------------------------

    def plan(
        self,
        message: GenerationRequest,
        identity: BlockHash,
        *,
        others: Sequence[tuple[BlockHash, MissReason]] = (),
        reveal: bool = False,
    ) -> CacheReport:
        """What a request would compute if it were admitted now. Nothing is touched, the order of eviction included."""
        tokens = encode_tokens(message.prompt_token_ids)
        hashes: list[BlockHash] = []
        self._tree.extend_hashes(hashes, identity, tokens)
        if message.cache.read:
            match = self._tables.look_up(identity, tokens, hashes)
            self._tables.explain(match, tokens, others)
        else:
            match = Match.nothing(len(message.prompt_token_ids), self._tree.block_size, MissReason.OPTED_OUT)
        return report(match, hashes, reveal=reveal or bool(message.cache_salt))

    def drop(self, node: PrefixNode, reason: MissReason = MissReason.DROPPED) -> None:
        """The K/V bytes of `node` are gone; running requests that hold them compute them again."""
        self._tables.drop(node, self.running, reason)

    def corrupt(self, taint: Taint, now: float) -> list[RequestOutput]:
        """Published K/V were found damaged: give up all that may carry the damage. Running requests that attended to
        it start again from what is trusted if nothing of theirs was sent, else they fail."""
        outputs = []
        if self.totals.steps > taint.since:
            for request in list(self.running):
                if not any(block is not None and block.block_id in taint.blocks for block in request.table):
                    continue
                own = [block for block in request.table if block is not None and not block.published]
                if request.num_generated:
                    outputs.append(
                        self._finish(request, FinishReason.ERROR, now, "cached K/V it had read were corrupt")
                    )
                else:
                    self._send_back(request, now, keep_tails=False)
                self.to_zero += [(block.block_id, 0) for block in own if block.ref_count == 0]
        for node in taint.nodes:
            block = node.block
            self._tables.drop(node, self.running, MissReason.CORRUPT)
            if block is not None:
                self.to_zero.append((block.block_id, 0))
        return outputs

    def invalidate(self, node: PrefixNode) -> None:
        """`node` and all below it are no longer true, nor is what was copied from them. Running requests that hold any
        of it finish on what they hold. `node` itself may be in the tree no longer."""
        self._tables.invalidate(node, self.running)

    def sources(self, wanted: Callable[[PrefixNode], bool]) -> list[PrefixNode]:
        """The wanted ones of the nodes that something was copied from; they may be in the tree no longer."""
        return self._tables.sources(wanted, self.running)

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Between steps: every reference is a table's, every table is whole, every pending block has a holder."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        holders: dict[BlockId, int] = {}
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            request.table.check_integrity()
            for index, block in enumerate(request.table):
                if block is None:
                    assert index in request.open
                    continue
                holders[block.block_id] = holders.get(block.block_id, 0) + 1
                assert index in request.open or block.written == self._tree.block_size
        for block in self._pool.blocks:
            assert block.ref_count == holders.get(block.block_id, 0), block
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING and not request.table and request.held is None
        assert self.running == sorted(self.running, key=_rank) and self.waiting == sorted(self.waiting, key=_rank)
        assert len(self._requests) == len(self.running) + len(self.waiting)
