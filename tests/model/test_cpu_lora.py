"""LoRA rows in the C backend: the torch network's values, and no bit of any other row."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.lora import LoraAdapter
from tests.model.adapters import rows_of
from tests.model.cpu import Built, CWorld, c_runner, checkpoint, native, random_steps
from tests.model.cpu_checks import adapted, check_adapters, same_bits, save_two, tokens_of
from tests.model.paged import Span
from tests.model.tiny import WIDE

LLAMA = "wide llama3"


@pytest.fixture(scope="module", params=["f32", "bf16"])
def built(request: pytest.FixtureRequest) -> Built:
    return native(request.param)


@pytest.fixture
def two(built: Built, tmp_path: Path) -> list[LoraAdapter]:
    return save_two(LLAMA, tmp_path, built.dtype)


@pytest.mark.parametrize("architecture", WIDE)
def test_base_and_two_adapters_in_one_step(architecture: str, built: Built, tmp_path: Path) -> None:
    check_adapters(architecture, built, tmp_path)


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_equals_one_pass(seed: int, two: list[LoraAdapter], built: Built) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 140) for _ in range(5)]
    requests = [tokens_of(LLAMA, length, seed=length) for length in lengths]
    adapters = [rng.choice([None, *two]) for _ in requests]
    runner = c_runner(LLAMA, built, threads=1 + seed)
    world = CWorld(checkpoint(LLAMA)[0], runner, built.dtype, requests, rng=rng)
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    for spans in random_steps(rng, lengths):
        rng.shuffle(spans := _in_order(spans))
        logits = runner.run(replace(world.inputs(spans), adapters=rows_of(spans, adapters)))
        for span, rows in zip(spans, logits.split([span.end - span.start for span in spans]), strict=True):
            parts[span.request].append(rows.clone())
    for tokens, adapter, found in zip(requests, adapters, parts, strict=True):
        assert same_bits(torch.cat(found), adapted(runner, built, LLAMA, [tokens], [adapter])[0])


def _in_order(spans: list[Span]) -> list[Span]:
    """One span for each request: those of one request stay in order when they are shuffled."""
    merged: dict[int, Span] = {}
    for span in spans:
        first = merged.get(span.request, span)
        merged[span.request] = Span(span.request, first.start, span.end)
    return list(merged.values())


def test_only_wanted_rows_get_logits(two: list[LoraAdapter], built: Built) -> None:
    """The last layer keeps these rows alone; each still belongs to its adapter."""
    requests = [tokens_of(LLAMA, 20, seed=seed) for seed in range(3)]
    adapters = [two[0], None, two[1]]
    runner = c_runner(LLAMA, built)
    whole = adapted(runner, built, LLAMA, requests, adapters)
    world = CWorld(checkpoint(LLAMA)[0], runner, built.dtype, requests)
    spans = [Span(n, 0, 20) for n in range(3)]
    for wanted in ([59, 3, 25, 39, 20], [21, 22], []):
        inputs = replace(world.inputs(spans, wanted), adapters=rows_of(spans, adapters))
        assert same_bits(runner.run(inputs), torch.cat(whole)[wanted])
