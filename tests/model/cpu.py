"""The C backend in the tiny paged world of paged.py, and where its libraries come from."""

from __future__ import annotations

import random
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from cache.block import BlockId
from cache.storage import KVStorage, PlaneShape, SlotOrder
from model.config import ModelConfig
from model.cpu.choose import NotApplicable, find_backend
from model.cpu.library import Library, find_library
from model.cpu.runner import CRunner
from model.cpu.weights import PackedModel, WeightForm
from model.network import Network
from model.quantized import QuantizedTensor
from tests.model.paged import CPU, PagedWorld, Span, config_of
from tests.model.tiny import build_tiny

ROOT = Path(__file__).parents[2]
EMULATED = Path(__file__).parent / "avx512"  # an <immintrin.h> that computes AVX-512's functions with AVX2
WORDS = {"f32": torch.float32, "bf16": torch.bfloat16}
SIZES = (1, 1, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 33, 47, 48, 49, 64, 100)


@dataclass(frozen=True, slots=True)
class Built:
    """A library and the dtype of its words."""

    path: Path
    variant: str

    @property
    def library(self) -> Library:
        return Library(self.path)

    @property
    def dtype(self) -> torch.dtype:
        return WORDS[self.variant.rpartition("_")[2]]


def native(word: str) -> Built:
    """What this processor would be given; skips where there is none."""
    try:
        backend = find_backend(WORDS[word], CPU)
    except NotApplicable as why:
        pytest.skip(str(why))
    return Built(find_library(backend.variant), backend.variant)


def sources() -> list[str]:
    """The C files that pip builds, as pyproject.toml lists them."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    lists = [module["sources"] for module in modules]
    assert all(each == lists[0] for each in lists)
    return [str(ROOT / source) for source in lists[0]]


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def compile_c(target: Path, *arguments: str) -> Path:
    """All sources and `arguments` into one file, for AVX2."""
    flags = ("-std=gnu11", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-I", str(ROOT / "model/cpu/csrc"))
    command = [compiler(), *flags, *arguments, *sources(), "-o", str(target), "-lpthread", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def emulated(word: str, directory: Path) -> Built:
    """The AVX-512 build of the sources, computed with AVX2."""
    variant = {"f32": "avx512_f32", "bf16": "avx512bf16_bf16"}[word]
    flags = ("-Og", "-Wno-psabi", "-I", str(EMULATED), f"-DPK_BF16={int(word == 'bf16')}", "-shared", "-fPIC")
    return Built(compile_c(directory / f"{variant}.so", *flags), variant)


@cache
def checkpoint(architecture: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    return config_of(architecture), build_tiny(architecture).state_dict()


def reference(architecture: str, dtype: torch.dtype, compute: torch.dtype = torch.float32) -> Network:
    """The torch network of the weights as they are in `dtype`."""
    config, weights = checkpoint(architecture)
    return Network(
        config, {name: tensor.to(dtype).to(compute) for name, tensor in weights.items()}, device=CPU, dtype=compute
    )


def c_runner(
    architecture: str,
    built: Built,
    *,
    block_size: int = 16,
    threads: int = 1,
) -> CRunner:
    config, weights = checkpoint(architecture)
    return runner_of(config, weights, built, block_size=block_size, threads=threads)


def runner_of(
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    built: Built,
    *,
    block_size: int = 16,
    threads: int = 1,
    form: WeightForm = WeightForm.DENSE,
    quantized: Callable[[str], QuantizedTensor | None] = lambda name: None,
) -> CRunner:
    converted = {name: tensor.to(built.dtype) for name, tensor in weights.items()}
    packed = PackedModel(config, converted, quantized, form, block_size, built.library)
    return CRunner(config, packed, built.library, built.variant, threads=threads)


class CWorld(PagedWorld):
    """Requests over a pool of the C backend: blocks that no request holds are full of NaN, the others zeroed, as a pool
    is before anyone writes."""

    def __init__(
        self,
        config: ModelConfig,
        runner: CRunner,
        dtype: torch.dtype,
        requests: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        rng: random.Random | None = None,
    ) -> None:
        self.place(requests, block_size, rng or random.Random(0))
        planes = tuple(
            PlaneShape(config.num_kv_heads, config.head_dim, order) for order in (SlotOrder.COLUMNS, SlotOrder.PAIRS)
        )
        self.storage = KVStorage(self.num_blocks, block_size, [planes] * config.num_layers, dtype, CPU)
        self.storage.blocks.fill_(torch.nan)
        for table in self.tables:
            for block in table:
                self.storage.zero(BlockId(block))
        runner.attach(self.storage.blocks)
        self.runner = runner

    def forget(self, request: int, block: int) -> None:
        """Lose the bytes of one block of a request."""
        self.storage.blocks[self.tables[request][block]] = torch.nan

    def planes(self, layer: int, plane: int, request: int) -> torch.Tensor:
        """K or V of a request, [kv_heads, positions, head_dim]."""
        blocks = [self.storage.slots(layer, plane, BlockId(block)) for block in self.tables[request]]
        return torch.cat(blocks, dim=1)[:, : len(self.requests[request])]


def c_dense(
    config: ModelConfig, runner: CRunner, dtype: torch.dtype, tokens: Sequence[int], block_size: int = 16
) -> torch.Tensor:
    """One request, alone, in one pass."""
    world = CWorld(config, runner, dtype, [tokens], block_size=block_size)
    return world.step([Span(0, 0, len(tokens))])[0].clone()


def random_steps(rng: random.Random, lengths: Sequence[int]) -> Iterator[list[Span]]:
    """Cut every request into spans and deal them out over steps, several per request and step, in any company."""
    done = [0] * len(lengths)
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        step: list[Span] = []
        for request, length in enumerate(lengths):
            for _ in range(rng.choice((0, 1, 1, 2))):
                size = min(rng.choice(SIZES), length - done[request])
                if size:
                    step.append(Span(request, done[request], done[request] + size))
                    done[request] += size
        if step:
            yield step
