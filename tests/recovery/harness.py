"""A real engine on a real, tiny network, watched where it matters: at the network's input and its logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cache.hashing import encode_tokens
from cache.identity import BlockHash
from cache.node import PrefixNode
from model.inputs import StepInputs
from scheduler.config import EngineConfig, Recovery
from scheduler.engine import Engine
from scheduler.messages import CacheControl, FinishReason, GenerationRequest, RequestOutput, SamplingParams

Ranges = list[tuple[int, int]]


class Watched:
    """An engine that logs, step by step, the positions its network was given and the logits it gave."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._count = 0
        self._run = engine.runner.run
        engine.runner.run = self._watch  # type: ignore[method-assign]

    def _watch(self, inputs: StepInputs) -> torch.Tensor:
        self.steps.append(inputs.positions.tolist())
        logits = self._run(inputs)
        self.logits.append(logits.clone())
        return logits

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        adapter: str | None = None,
        cache: CacheControl | None = None,
        report: bool = False,
        after: str | None = None,
        **params: object,
    ) -> str:
        """Greedy unless `params` (of SamplingParams) say otherwise; to the last token, end of sequence or not."""
        self._count += 1
        name = f"request {self._count}"
        defaults = {"seed": 0, "temperature": 0.0, "ignore_eos": True}
        sampling = SamplingParams(max_tokens=max_tokens, **(defaults | params))  # type: ignore[arg-type]
        control = cache or CacheControl()
        request = GenerationRequest(
            name, tuple(prompt), sampling, priority, salt, adapter, control, report=report, after=after
        )
        refused = self.engine.add(request)
        assert refused is None, refused
        self.outputs[name] = []
        return name

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self.outputs[output.request_id].append(output)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                self.engine.scheduler.check_integrity()
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def tokens(self, name: str) -> list[int]:
        assert self.outputs[name][-1].finish_reason is FinishReason.LENGTH, self.outputs[name][-1]
        return [token for output in self.outputs[name] for token in output.token_ids]

    def complete(self, prompt: Sequence[int], max_tokens: int = 1) -> list[int]:
        """Run one request alone, to its end; returns its new tokens. `steps` and `logits` then hold only its own."""
        self.steps.clear()
        self.logits.clear()
        name = self.submit(prompt, max_tokens)
        self.run()
        return self.tokens(name)

    def computed(self, prompt: Sequence[int]) -> Ranges:
        """The positions that a request for one token computes, over all its steps, as [start, end) ranges."""
        self.complete(prompt)
        return as_ranges(position for step in self.steps for position in step)

    def node(self, prompt: Sequence[int], index: int) -> PrefixNode:
        """The record of block `index` of a prompt."""
        hashes: list[BlockHash] = []
        self.engine.tree.extend_hashes(hashes, self.engine.identity.root_hash(), encode_tokens(prompt))
        node = self.engine.tree.node(hashes[index])
        assert node is not None
        return node

    def drop(self, prompt: Sequence[int], *indices: int) -> None:
        for index in indices:
            self.engine.scheduler.drop(self.node(prompt, index))


def as_ranges(positions: Iterator[int]) -> Ranges:
    ranges: Ranges = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = ranges[-1][0], position + 1
        else:
            ranges.append((position, position + 1))
    return ranges


def make_engine(
    model: Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    num_blocks: int = 64,
    budget: int = 512,
    max_num_seqs: int = 16,
    recovery: str = "repair",
    partial_reuse: bool = True,
    max_model_len: int | None = None,
    hash_bits: int = 128,
    threads: int = 1,  # a tiny network gains nothing from more
    backend: str = "auto",
    weights: str = "auto",
) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model),
            dtype=dtype,
            device="cpu",
            threads=threads,
            backend=backend,
            weights=weights,
            hash_bits=hash_bits,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            recovery=Recovery(recovery),
            partial_reuse=partial_reuse,
        )
    )
