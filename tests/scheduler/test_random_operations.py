"""Thousands of random arrivals, aborts, drops, invalidations, failures in tiny pools: nothing leaks, nothing is lost,
and every token is the dense reference's."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.identity import BlockHash
from scheduler.messages import CacheControl, FinishReason, PrefixPin
from tests.scheduler.world import IDENTITY, World, dense

STEMS = [[7] * 40, [7] * 9 + [8] * 31, [7] * 20 + [9] * 20, list(range(40))]

CONTROLS = [CacheControl()] * 4 + [
    CacheControl(read=False),
    CacheControl(write=False),
    CacheControl(read=False, write=False),
    CacheControl(ttl=3.0),
    CacheControl(pin=True),
    CacheControl(prefix_pins=(PrefixPin(20, 0.5), PrefixPin(9, 3.0))),
]
IDENTITIES = [IDENTITY, IDENTITY, BlockHash(b"another identity")]


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts that share prefixes often, and end anywhere."""
    stem = st.sampled_from(STEMS)
    cut = st.integers(1, 28)
    tail = st.lists(st.integers(0, 3), max_size=6)
    return st.builds(lambda stem, cut, tail: stem[:cut] + tail, stem, cut, tail)


class Operations(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(12, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 40),
        seqs=st.integers(1, 5),
        recovery=st.sampled_from(["repair", "truncate"]),
        partial=st.booleans(),
        bits=st.sampled_from([8, 128]),
    )
    def build(self, num_blocks, block_size, budget, seqs, recovery, partial, bits) -> None:
        self.world = World(
            num_blocks=num_blocks * 4 // block_size,
            block_size=block_size,
            budget=budget,
            max_num_seqs=seqs,
            recovery=recovery,
            partial_reuse=partial,
            hash_bits=bits,
        )
        self.count = 0
        self.limits: dict[str, int] = {}
        self.failed: set[str] = set()

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        cache=st.sampled_from(CONTROLS),
        identity=st.sampled_from(IDENTITIES),
    )
    def arrive(self, prompt, max_tokens, priority, cache, identity, after=None) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.limits[name] = max_tokens
        self.world.add(name, prompt, max_tokens, priority, identity, cache, after)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        cache=st.sampled_from(CONTROLS),
        identity=st.sampled_from(IDENTITIES),
        others=st.integers(1, 3),
    )
    def arrive_with_others(self, prompt, max_tokens, priority, cache, identity, others) -> None:
        """Several choices of one prompt."""
        first = f"r{self.count}"
        self.arrive(prompt, max_tokens, priority, cache, identity)
        for _ in range(others):
            self.arrive(prompt, max_tokens, priority, cache, identity, after=first)

    @rule(count=st.integers(1, 4))
    def step(self, count) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def fail_a_step(self) -> None:
        self.world.step(fail=True)

    @rule(pick=st.integers(0, 10**6))
    def break_a_request(self, pick) -> None:
        """The network gives NaN for one request, where its logits show it at once."""
        self.world.step(broken=pick)

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick) -> None:
        live = [name for name, ends in self.world.ends.items() if not ends]
        if live:
            self.world.abort(live[pick % len(live)])

    @rule(pick=st.integers(0, 10**6))
    def drop(self, pick) -> None:
        nodes = sorted(self.world.tree, key=lambda node: node.hash)
        if nodes:
            self.world.scheduler.drop(nodes[pick % len(nodes)])

    @rule(pick=st.integers(0, 10**6))
    def lose_record(self, pick) -> None:
        nodes = [node for node in self.world.tree if node.block is None or node.block.ref_count == 0]
        nodes = sorted((n for n in nodes if not held_below(n) and n.pending is None), key=lambda node: node.hash)
        if nodes:
            self.world.tree.lose_record(nodes[pick % len(nodes)])

    @rule(pick=st.integers(0, 10**6))
    def invalidate(self, pick) -> None:
        nodes = sorted(self.world.tree, key=lambda node: node.hash)
        if nodes:
            self.world.scheduler.invalidate(nodes[pick % len(nodes)])

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        self.world.check()
        assert all(block.ref_count == 0 for block in self.world.pool.blocks)
        assert self.world.pool.available + self.world.pool.breakable == len(self.world.pool.blocks)
        totals = self.world.scheduler.totals
        assert totals.prompt_tokens == totals.reused + totals.copied + totals.pending + totals.computed
        for name, ends in self.world.ends.items():
            assert len(ends) == 1, f"{name} ended {len(ends)} times"
            got = self.world.tokens[name]
            assert got == dense(self.world.prompts[name], self.limits[name])[: len(got)]
            if ends[0] is FinishReason.LENGTH:
                assert len(got) == self.limits[name]


def held_below(node) -> bool:  # type: ignore[no-untyped-def]
    """Does a running request's chain end in this node or below it?"""
    return node.holds > 0 or any(held_below(child) for child in node.children)


Operations.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestRandomOperations = Operations.TestCase


@pytest.mark.parametrize("seed", range(8))
def test_long_random_run(seed: int) -> None:
    """A few thousand operations on one world, without hypothesis' bookkeeping."""
    rng = random.Random(seed)
    bits = rng.choice([8, 128])
    world = World(num_blocks=rng.choice([12, 20, 40]), block_size=4, budget=rng.choice([1, 7, 16, 64]), hash_bits=bits)
    limits = {}
    for number in range(3000):
        action = rng.random()
        if action < 0.25 and len(world.scheduler.waiting) < 12:
            stem = rng.choice(STEMS)[: rng.randint(1, 28)]
            name, limits_now = f"r{number}", rng.randint(1, 12)
            limits[name] = limits_now
            world.add(name, stem + rng.choices(range(3), k=rng.randint(0, 6)), limits_now, rng.randint(0, 1))
        elif action < 0.30:
            live = [name for name, ends in world.ends.items() if not ends]
            if live:
                world.abort(rng.choice(live))
        elif action < 0.40 and len(world.tree):
            world.scheduler.drop(rng.choice(sorted(world.tree, key=lambda node: node.hash)))
        elif action < 0.41 and len(world.tree):
            world.scheduler.invalidate(rng.choice(sorted(world.tree, key=lambda node: node.hash)))
        else:
            world.step(fail=rng.random() < 0.01)
        world.check()
    world.run()
    world.check()
    assert all(block.ref_count == 0 for block in world.pool.blocks)
    for name, ends in world.ends.items():
        assert len(ends) == 1
        assert world.tokens[name] == dense(world.prompts[name], limits[name])[: len(world.tokens[name])]
    assert world.scheduler.totals.preemptions > 0 or world.pool.evictions > 0
