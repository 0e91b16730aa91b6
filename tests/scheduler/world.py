"""A tiny world around the real scheduler, tree and pool: only the network is made up.

The made-up network keeps one value per slot. The right value of a position is a digest of all tokens up to it, so a
slot with anything else in it (stale, promised but not written, of another prefix) is told from a right one. A step
writes the values of all its spans and then "attends": the next token is a digest of what really is in the slots of all
positions so far. `dense` computes the same from the tokens alone.

A step that fails, and a request whose network breaks, leave POISON in the slots they write. Whoever attends to it gets
no token but an error; and nobody may ever be given a block that still has any, not even in a slot that is masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from cache.hashing import BlockHasher
from cache.identity import BlockHash
from cache.pool import BlockPool
from cache.tree import PrefixTree
from scheduler.batch import Batch
from scheduler.config import Recovery, SchedulerConfig
from scheduler.messages import CacheControl, FinishReason, GenerationRequest, RequestOutput, SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Sampled, Scheduler

VOCAB = 97
POISON = -2  # what NaN is to a real network
IDENTITY = BlockHash(b"identity of test")


def digests(tokens: Sequence[int]) -> list[int]:
    """The right value of each position."""
    state = xxhash.xxh3_64()
    values = []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        values.append(state.intdigest())
    return values


def next_token(values: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(repr(list(values)).encode()) % VOCAB


def dense(prompt: Sequence[int], count: int) -> list[int]:
    """The reference: `count` tokens after `prompt`, with no cache at all."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(digests(tokens)))
    return tokens[len(prompt) :]


class World:
    """A scheduler that can be stepped. `computed` logs, per request and step, the spans that reached the network."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 2048,
        max_num_seqs: int = 16,
        recovery: str = "repair",
        partial_reuse: bool = True,
        hash_bits: int = 128,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size, BlockHasher(hash_bits))
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=num_blocks * block_size,
            recovery=Recovery(recovery),
            partial_reuse=partial_reuse,
        )
        self.scheduler = Scheduler(self.pool, self.tree, config, eos_token_ids=eos)
        self.slots: dict[tuple[int, int], int] = {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.ends: dict[str, list[FinishReason]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.clock = 0.0
        self._broken: str | None = None

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        priority: int = 0,
        identity: BlockHash = IDENTITY,
        cache: CacheControl | None = None,
        after: str | None = None,
        **sampling: object,
    ) -> str:
        params = SamplingParams(max_tokens=max_tokens, seed=0, **sampling)  # type: ignore[arg-type]
        message = GenerationRequest(name, tuple(prompt), params, priority, cache=cache or CacheControl(), after=after)
        self.scheduler.add(message, identity, self.clock)
        self.prompts[name] = tuple(prompt)
        self.tokens[name], self.ends[name], self.outputs[name] = [], [], []
        return name

    def step(self, *, fail: bool = False, broken: str | int | None = None) -> Batch:
        """One step. With `fail` the network raises after it has written; `broken` names a request whose positions
        come out as NaN, or is any number that picks one of those that are sampled."""
        self.clock += 1.0
        batch = self.scheduler.schedule(self.clock)
        self._zero()
        if not batch.spans:
            assert not batch.copies and not batch.sampled
            return batch
        self.steps.append([(span.request.request_id, span.start, span.end) for span in batch.spans])
        if isinstance(broken, int):
            broken = batch.sampled[broken % len(batch.sampled)].request_id if batch.sampled else None
        self._broken = broken
        if fail:
            self._write(batch, set(batch.requests))
            outputs = self.scheduler.fail(batch, "made to fail", self.clock)
        else:
            outputs = self.scheduler.update(batch, self._run(batch), self.clock)
        self._zero()
        self.deliver(outputs)
        return batch

    def _zero(self) -> None:
        for block_id, first in self.scheduler.to_zero:
            for slot in range(first, self.block_size):
                self._set(block_id, slot, 0)
        self.scheduler.to_zero.clear()

    def _run(self, batch: Batch) -> dict[str, Sampled]:
        check_rules(batch, self.block_size)
        self._write(batch, {request for request in batch.requests if request.request_id == self._broken})
        return {request.request_id: self._sample(request) for request in batch.sampled}

    def _write(self, batch: Batch, broken: set[Request]) -> None:
        for copy in batch.copies:
            for slot in range(self.block_size):  # whole blocks move, as in the real storage
                self._set(copy.target.block_id, slot, self.slots.get((copy.source.block_id, slot), -1))
        for span in batch.spans:
            values = digests(span.request.tokens)
            for position in range(span.start, span.end):
                value = POISON if span.request in broken else values[position]
                self._set(*self._slot(span.request, position), value)

    def _sample(self, request: Request) -> Sampled:
        values = [self.slots[self._slot(request, position)] for position in range(len(request.tokens))]
        if POISON in values:
            return Sampled(error="not finite", is_broken=True)
        for block in request.table:
            assert block is not None
            left = [self.slots.get((block.block_id, slot)) for slot in range(self.block_size)]
            assert POISON not in left, f"{request} was given {block} with what a failed request left in it"
        return Sampled(next_token(values))

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        block = request.table[position // self.block_size]
        assert block is not None
        return block.block_id, position % self.block_size

    def _set(self, block_id: int, slot: int, value: int) -> None:
        self.slots[block_id, slot] = value

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            self.outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                self.ends[output.request_id].append(output.finish_reason)

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name, self.clock)
        self.deliver([] if output is None else [output])

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def complete(self, name: str, prompt: Sequence[int], max_tokens: int = 1) -> list[tuple[int, int]]:
        """Run one request to its end; the positions it computed, as [start, end) spans step after step."""
        before = len(self.steps)
        self.add(name, prompt, max_tokens)
        self.run()
        return self.computed(name, before)

    def computed(self, name: str, since: int = 0) -> list[tuple[int, int]]:
        return [(start, end) for step in self.steps[since:] for who, start, end in step if who == name]

    def node(self, prompt: Sequence[int], index: int):  # type: ignore[no-untyped-def]
        """The node of block `index` of a prompt."""
        from cache.hashing import encode_tokens

        hashes: list[BlockHash] = []
        self.tree.extend_hashes(hashes, IDENTITY, encode_tokens(prompt))
        return self.tree.node(hashes[index])

    def drop(self, prompt: Sequence[int], *indices: int) -> None:
        for index in indices:
            node = self.node(prompt, index)
            assert node is not None
            self.scheduler.drop(node)

    def check(self) -> None:
        self.scheduler.check_integrity()


def check_rules(batch: Batch, block_size: int) -> None:
    """Span rules 1, 2, 4 and the copies', against the state before the step."""
    valid = {copy.target: copy.slots for copy in batch.copies}
    sources = {copy.source for copy in batch.copies}
    assert not sources & valid.keys(), "a copy's target is a source"
    for copy in batch.copies:
        assert copy.source.ref_count > 0
        assert copy.source.published or copy.slots <= copy.source.written, "what is not written yet is copied"
    written: dict[object, set[int]] = {}
    ends: dict[str, int] = {}
    for span in batch.spans:
        name = span.request.request_id
        assert ends.get(name, 0) <= span.start < span.end <= len(span.request.tokens)
        ends[name] = span.end
        for position in range(span.start, span.end):
            block = span.request.table[position // block_size]
            assert block is not None and not block.published, "a published block is written"
            slot = position % block_size
            assert slot not in written.setdefault(block, set()), "a slot is written twice in a step"
            written[block].add(slot)
            assert slot >= max(block.written, valid.get(block, 0)), "a valid slot is computed again"
    for name, end in ends.items():
        request = next(span.request for span in batch.spans if span.request.request_id == name)
        for position in range(end):
            block = request.table[position // block_size]
            assert block is not None
            slot = position % block_size
            ready = slot < max(block.written, valid.get(block, 0)) or slot in written.get(block, ())
            assert ready, f"{name} would attend to position {position}, which nobody has written"
    for request in batch.sampled:
        assert ends[request.request_id] == len(request.tokens), "sampled without its last position"
