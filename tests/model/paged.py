"""A tiny paged world: a network, planes full of NaN, and requests whose blocks lie anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model.attention.base import Attention
from model.attention.torch_reference import TorchReference
from model.config import ModelConfig
from model.hf_config import config_from_hf
from model.inputs import StepInputs
from model.network import Network
from model.runner import Runner
from tests.model.tiny import build_tiny, tiny_config

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Span:
    request: int
    start: int
    end: int


def config_of(architecture: str) -> ModelConfig:
    with TemporaryDirectory() as directory:
        tiny_config(architecture).save_pretrained(directory)
        return config_from_hf(Path(directory))


def make_network(architecture: str, dtype: torch.dtype = torch.float32) -> Network:
    return Network(config_of(architecture), build_tiny(architecture).state_dict(), device=CPU, dtype=dtype)


class PagedWorld:
    """Requests over a pool of blocks that were never zeroed: whatever reads a slot that was not written shows."""

    def __init__(
        self,
        network: Network,
        requests: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        rng: random.Random | None = None,
        attention: Attention | None = None,
    ) -> None:
        config = network.config
        self.place(requests, block_size, rng or random.Random(0))
        shape = (self.num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=network.dtype)
        planes = [(self.pool[:, layer, 0], self.pool[:, layer, 1]) for layer in range(config.num_layers)]
        self.runner = Runner(network, attention or TorchReference(block_size), planes)

    def place(self, requests: Sequence[Sequence[int]], block_size: int, rng: random.Random) -> None:
        """Give the requests blocks, anywhere in a pool of `num_blocks`."""
        self.requests = requests
        self.block_size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in requests]
        self.num_blocks = sum(needed) + 4
        ids = list(range(1, self.num_blocks))
        rng.shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]

    def inputs(self, spans: Sequence[Span], logit_rows: Sequence[int] | None = None) -> StepInputs:
        """One step's inputs; logits of every row unless `logit_rows` says otherwise."""
        where = [(span.request, position) for span in spans for position in range(span.start, span.end)]
        tables = [self.tables[span.request][: -(-span.end // self.block_size)] for span in spans]
        width = max(len(table) for table in tables)
        size = self.block_size
        slots = [self.tables[request][position // size] * size + position % size for request, position in where]
        return StepInputs(
            token_ids=torch.tensor([self.requests[request][position] for request, position in where]),
            positions=torch.tensor([position for _, position in where]),
            slots=torch.tensor(slots),
            q_len=tuple(span.end - span.start for span in spans),
            kv_len=tuple(span.end for span in spans),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            logit_rows=torch.tensor(list(range(len(where)) if logit_rows is None else logit_rows), dtype=torch.int64),
        )

    def step(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Logits [end - start, vocab_size] of each span."""
        logits = self.runner.run(self.inputs(spans))
        return list(logits.split([span.end - span.start for span in spans]))

    def forget(self, request: int, block: int) -> None:
        """Lose the bytes of one block of a request."""
        self.pool[self.tables[request][block]] = torch.nan


def dense(network: Network, tokens: Sequence[int], block_size: int = 16) -> torch.Tensor:
    """The yardstick: one request, alone, in one pass. Logits [len(tokens), vocab_size]."""
    return PagedWorld(network, [tokens], block_size=block_size).step([Span(0, 0, len(tokens))])[0]


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
