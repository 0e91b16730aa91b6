"""What each build of the C backend must show: the torch network's values, and its own bits whatever the way to them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from model.cpu.runner import CRunner
from model.lora import LoraAdapter, LowRank, load_adapter
from model.network import Network
from tests.model.adapters import rows_of, save_adapter
from tests.model.cpu import Built, CWorld, c_dense, c_runner, checkpoint, random_steps, reference
from tests.model.paged import CPU, PagedWorld, Span, random_tokens

LENGTHS = (170, 33, 7)
"""Of the requests of a schedule: more than one segment of keys, more than one block, less than one."""


def tokens_of(architecture: str, count: int = LENGTHS[0], seed: int = 1) -> list[int]:
    return random_tokens(random.Random(seed), count, checkpoint(architecture)[0].vocab_size)


def rms(difference: torch.Tensor) -> float:
    return difference.double().pow(2).mean().sqrt().item()


def check_values(architecture: str, built: Built) -> None:
    """Logits and K/V are the torch network's. In float32 to rounding. In bfloat16 both round, at different places: what
    the C backend is off from float32 with the same weights is at most what torch's own bfloat16 is off."""
    config = checkpoint(architecture)[0]
    tokens = tokens_of(architecture)
    runner = c_runner(architecture, built)
    world = CWorld(config, runner, built.dtype, [tokens])
    spans = [Span(0, 0, len(tokens))]
    found = world.step(spans)[0]
    exact = PagedWorld(reference(architecture, built.dtype), [tokens])
    wanted = exact.step(spans)[0]
    coarse = PagedWorld(reference(architecture, built.dtype, built.dtype), [tokens])
    allowed = 1e-4 if built.dtype == torch.float32 else rms(coarse.step(spans)[0].float() - wanted)
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    difference = found - wanted
    assert (difference.abs().max().item() if built.dtype == torch.float32 else rms(difference)) <= allowed
    for layer in range(config.num_layers):
        for plane in (0, 1):
            ours = world.planes(layer, plane, 0).float()
            theirs, rounded = (_planes(each, layer, plane, len(tokens)).float() for each in (exact, coarse))
            off = rms(rounded - theirs) if built.dtype != torch.float32 else 1e-5
            assert rms(ours - theirs) <= 1.05 * off


def _planes(world: PagedWorld, layer: int, plane: int, positions: int) -> torch.Tensor:
    """K or V of the first request, [kv_heads, positions, head_dim]."""
    return torch.cat([world.pool[block, layer, plane] for block in world.tables[0]], dim=1)[:, :positions]


def check_schedule(architecture: str, built: Built, block_size: int, threads: int, seed: int) -> None:
    """Random spans in random company over blocks of any size give the bits of one pass with blocks of 16."""
    config = checkpoint(architecture)[0]
    rng = random.Random(seed)
    requests = [random_tokens(rng, length, config.vocab_size) for length in LENGTHS]
    runner = c_runner(architecture, built, block_size=block_size, threads=threads)
    world = CWorld(config, runner, built.dtype, requests, block_size=block_size, rng=rng)
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in random_steps(rng, LENGTHS):
        for span, rows in zip(step, world.step(step), strict=True):
            parts[span.request].append(rows.clone())
    alone = c_runner(architecture, built)
    for tokens, found in zip(requests, parts, strict=True):
        expected = c_dense(config, alone, built.dtype, tokens)
        assert expected.isfinite().all()
        assert same_bits(torch.cat(found), expected)


def check_rows(architecture: str, built: Built, threads: int) -> None:
    """As many rows as products and attention cut or share out in different ways: the bits of one pass."""
    config = checkpoint(architecture)[0]
    tokens = tokens_of(architecture)
    expected = c_dense(config, c_runner(architecture, built), built.dtype, tokens)
    runner = c_runner(architecture, built, threads=threads)
    for rows in (*range(1, 15), 24, 25, 31, 47, 48, 49, 96, 97, 144, 145, len(tokens)):
        assert same_bits(c_dense(config, runner, built.dtype, tokens[:rows]), expected[:rows])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def adapted(
    runner: CRunner, built: Built, architecture: str, requests: list[list[int]], adapters: list[LoraAdapter | None]
) -> list[torch.Tensor]:
    """Logits of each request in one pass, together."""
    world = CWorld(checkpoint(architecture)[0], runner, built.dtype, requests)
    spans = [Span(index, 0, len(tokens)) for index, tokens in enumerate(requests)]
    logits = runner.run(replace(world.inputs(spans), adapters=rows_of(spans, adapters))).clone()
    return list(logits.split([len(tokens) for tokens in requests]))


def check_adapters(architecture: str, built: Built, directory: Path) -> None:
    """Rows of the base model and of two adapters in one step: each as alone, and as the torch network has them."""
    requests = [tokens_of(architecture, length, seed=length) for length in (37, 60, 1, 16, 90)]
    x, y = save_two(architecture, directory, built.dtype)
    adapters = [None, x, y, x, None]
    runner = c_runner(architecture, built, threads=2)
    together = adapted(runner, built, architecture, requests, adapters)
    config = checkpoint(architecture)[0]
    for tokens, adapter, logits in zip(requests, adapters, together, strict=True):
        alone = c_dense(config, runner, built.dtype, tokens) if adapter is None else None
        expected = adapted(runner, built, architecture, [tokens], [adapter])[0] if alone is None else alone
        assert same_bits(logits, expected)
        exact = _in_torch(reference(architecture, built.dtype), tokens, _widened(adapter))
        coarse = _in_torch(reference(architecture, built.dtype, built.dtype), tokens, adapter)
        is_exact = built.dtype == torch.float32
        assert rms(logits - exact) <= (1e-5 if is_exact else rms(coarse.float() - exact))


def save_two(architecture: str, directory: Path, dtype: torch.dtype) -> list[LoraAdapter]:
    """Two adapters: one of every projection, of ranks that fill no panel and more than one; one of some products."""
    config = checkpoint(architecture)[0]
    save_adapter(architecture, directory / "x", seed=1, r=5, rank_pattern={r"layers\.1\.mlp\..*": 40})
    save_adapter(architecture, directory / "y", seed=2, r=3, target_modules=["v_proj", "up_proj"])
    return [load_adapter(directory / name, config, dtype=dtype, device=CPU) for name in "xy"]


def _widened(adapter: LoraAdapter | None) -> LoraAdapter | None:
    if adapter is None:
        return None
    deltas = {name: LowRank(delta.down.float(), delta.up.float()) for name, delta in adapter.deltas.items()}
    return LoraAdapter(deltas, adapter.digest, adapter.rank)


def _in_torch(network: Network, tokens: list[int], adapter: LoraAdapter | None) -> torch.Tensor:
    world = PagedWorld(network, [tokens])
    spans = [Span(0, 0, len(tokens))]
    return world.runner.run(replace(world.inputs(spans), adapters=rows_of(spans, [adapter])))
