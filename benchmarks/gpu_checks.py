"""Is the GPU path right? Backends against the reference and against themselves, graphs against none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_world import SMOKE, Pool, RandomWeights, Scale, Span, backends, decode_graphs
from model.attention.base import Attention
from model.attention.torch_reference import TorchReference
from model.inputs import StepInputs
from model.network import Network


def compare_attention(scale: Scale, device: torch.device) -> list[dict[str, Any]]:
    """Every backend against the reference, and against itself when the same positions are computed in another way."""
    found = []
    length = scale.pool_tokens // 4 if scale is SMOKE else 1300
    spans = [(0, length - 1, length), (1, 0, length // 2), (2, length // 2, length // 2 + 3), (3, 0, 1)]
    for heads, kv_heads, head_dim in scale.shapes:
        for dtype in scale.dtypes:
            config = replace(scale.config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=2)
            small = replace(scale, pool_tokens=min(scale.pool_tokens, 4 * (length + scale.block_size)))
            pool = Pool(config, small, dtype, device)
            query = torch.randn(pool.inputs(spans).slots.shape[0], heads, head_dim, device=device).to(dtype)
            expected = _attend(TorchReference(scale.block_size), pool, pool.inputs(spans), query).float()
            for name, backend in backends(device, dtype, head_dim, scale.block_size).items():
                output = _attend(backend, pool, pool.inputs(spans), query).float()
                error = float((output - expected).abs().max())
                allowed = max(4 * torch.finfo(dtype).eps, 2e-5)
                about = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": str(dtype)[6:]}
                same = _same_bits(backend, pool, length, query[: scale.compared])
                found.append({"backend": name, **about, "error": error, "ok": error <= allowed, **same})
    return found


def _attend(backend: Attention, pool: Pool, inputs: StepInputs, query: torch.Tensor) -> torch.Tensor:
    backend.prepare(inputs)
    return backend.attend(pool.planes[1], query)


def _same_bits(backend: Attention, pool: Pool, length: int, query: torch.Tensor) -> dict[str, int]:
    """Of the last positions of a request, as many as there are queries, how many differ in any bit from a
    long span's when they are computed in
    two spans of half the length, one by one beside others, and one by one alone."""
    count = len(query)

    def rows(spans: list[Span]) -> torch.Tensor:
        """Outputs of request 0's spans, whose queries are those of their positions."""
        first = length - count
        flat = torch.cat(
            [torch.arange(start, end) - first if n == 0 else torch.zeros(end - start) for n, start, end in spans]
        )
        output = _attend(backend, pool, pool.inputs(spans), query[flat.long().to(pool.device)])
        parts = output.split([end - start for _, start, end in spans])
        return torch.cat([part for (request, _, _), part in zip(spans, parts, strict=True) if request == 0])

    start = length - count
    long = rows([(0, start, length)])
    half = rows([(0, start, start + count // 2), (0, start + count // 2, length)])
    alone = torch.cat([rows([(0, position, position + 1)]) for position in range(start, length)])
    beside = torch.cat(
        [
            rows([(1, 0, 1), (0, position, position + 1), (2, length - 9, length - 8)])
            for position in range(start, length)
        ]
    )
    return {
        "differ_in_halves": _differing(long, half),
        "differ_one_by_one": _differing(long, alone),
        "differ_by_company": _differing(alone, beside),
    }


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    return int((left != right).flatten(1).any(1).sum())


def compare_graphs(scale: Scale, device: torch.device) -> list[dict[str, Any]]:
    """Decode through graphs against decode without, on a shallow network; padding must write nothing."""
    config = replace(scale.config, num_layers=min(2, scale.config.num_layers))
    network = Network(config, RandomWeights(config, scale.dtype, device), device=device, dtype=scale.dtype)
    found = []
    for name, backend in backends(device, scale.dtype, config.head_dim, scale.block_size).items():
        small = replace(scale, pool_tokens=min(scale.pool_tokens, 3 * 640))
        plain, graphed = Pool(config, small, scale.dtype, device), Pool(config, small, scale.dtype, device)
        graphed.blocks.copy_(plain.blocks)
        graphs = decode_graphs(network, backend, graphed, device)
        end = small.pool_tokens // 3 // scale.block_size * scale.block_size - 3
        for step in range(2):  # a capture, and a replay with other inputs
            spans = [(request, end + step - request, end + step - request + 1) for request in range(3)]
            inputs = plain.inputs(spans, config.vocab_size)
            expected = network.forward(inputs, plain.planes, backend)
            logits = graphs.run(inputs)
        ok = logits is not None and torch.allclose(logits, expected, rtol=0.02, atol=0.1)
        error = None if logits is None else float((logits - expected).abs().max())
        written = (graphed.blocks != plain.blocks).flatten(1).any(1).nonzero().flatten().tolist()
        touched = set((inputs.slots // scale.block_size).tolist())
        found.append({"backend": name, "error": error, "ok": ok and set(written) <= touched})
    return found
