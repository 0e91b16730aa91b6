"""The GPU path on one card, in under five minutes: is it right, and how near to what the card can do?

    python -m benchmarks.gpu                 on a machine with a CUDA GPU
    python -m benchmarks.gpu --smoke         the same script in miniature, on any machine (Triton's interpreter on CPU)

First the card's own bandwidth (of a copy) and matrix rate are measured. Then every attention backend that runs here is
compared with the plain torch reference, and with itself for equal bits; and decode through CUDA graphs with decode
without. Then attention alone and whole steps of a network of Llama 3 8B's shape (random weights; fewer layers where
memory is short) are timed against their floors: bytes to be read over bandwidth, or products over the matrix rate.

Prints tables, and one JSON document as the last line. Exit status 1 if a comparison failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.gpu_checks import compare_attention, compare_graphs
from benchmarks.gpu_world import FULL, SMOKE, Pool, RandomWeights, Scale, Span, backends, capture, decode_graphs
from benchmarks.report import digits, hardware
from model.attention.base import Attention
from model.config import ModelConfig
from model.network import Network
from model.tensors import expected_tensors


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results. The floor is the time that the card's measured limits would allow."""

    name: str
    backend: str
    milliseconds: float
    floor: float
    limit: str  # bandwidth | matrix rate

    @property
    def share(self) -> float:
        return self.floor / self.milliseconds


def _time(function: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median of repeated runs after one that does not count, in milliseconds."""

    def once() -> float:
        if device.type == "cpu":
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    once()
    times = [once()]
    while len(times) < 100 and sum(times) < seconds * 1e3:
        times.append(once())
    return statistics.median(times)


def measure_limits(scale: Scale, device: torch.device) -> tuple[float, float]:
    """Bytes read and written per millisecond by a copy, and floating-point operations per millisecond by a product."""
    source = torch.zeros(scale.copied, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * 2 * scale.copied / _time(lambda: target.copy_(source), device, scale.seconds)
    side = scale.square
    left = torch.empty((side, side), dtype=scale.dtype, device=device).normal_()
    rate = 2 * side**3 / _time(lambda: left @ left, device, scale.seconds)
    return bandwidth, rate


def _decode_spans(requests: int, context: int) -> list[Span]:
    return [(request, context - 1, context) for request in range(requests)]


def _kv_bytes(config: ModelConfig, dtype: torch.dtype, positions: int) -> int:
    """Of one layer."""
    return positions * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def _attention_work(config: ModelConfig, tokens: int, before: int) -> int:
    """Floating-point operations of one layer's attention over a span, the masked half not counted."""
    return 4 * config.num_heads * config.head_dim * (tokens * before + tokens * (tokens + 1) // 2)


def time_attention(scale: Scale, pool: Pool, config: ModelConfig, limits: tuple[float, float]) -> Iterator[Row]:
    """Per layer; all layers run one after the other, so that none finds its K/V in the card's cache."""
    bandwidth, rate = limits
    for name, backend in backends(pool.device, scale.dtype, config.head_dim, scale.block_size).items():
        cases = [(_decode_spans(*case), f"attention, decode {case[0]} x {case[1]}") for case in scale.decode]
        cases += [([(0, before, before + n)], f"attention, {n} after {before}") for n, before in scale.prefill]
        for spans, title in cases:
            inputs = pool.inputs(spans)
            query = torch.randn(len(inputs.slots), config.num_heads, config.head_dim, device=pool.device).to(
                scale.dtype
            )
            backend.prepare(inputs)

            def layers(backend: Attention = backend, query: torch.Tensor = query) -> None:
                for planes in pool.planes:
                    backend.attend(planes, query)

            run = capture(pool.device)(layers)
            milliseconds = _time(run, pool.device, scale.seconds) / config.num_layers
            reading = _kv_bytes(config, scale.dtype, sum(inputs.kv_len)) / bandwidth
            work = sum(_attention_work(config, end - start, start) for _, start, end in spans) / rate
            yield _row(title, name, milliseconds, reading, work)


def time_steps(scale: Scale, pool: Pool, network: Network, limits: tuple[float, float]) -> Iterator[Row]:
    """Whole steps: the network over all layers, logits included."""
    config, (bandwidth, rate) = network.config, limits
    shapes = expected_tensors(config)
    numbers = sum(shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size
    for name, backend in backends(pool.device, scale.dtype, config.head_dim, scale.block_size).items():
        replays = decode_graphs(network, backend, pool, pool.device)
        for requests, context in scale.decode:
            inputs = pool.inputs(_decode_spans(requests, context), config.vocab_size)
            kv = config.num_layers * _kv_bytes(config, scale.dtype, requests * context)
            reading = (numbers * scale.dtype.itemsize + kv) / bandwidth
            work = 2 * numbers * requests / rate
            title = f"decode {requests} x {context}"
            with_graph = _time(lambda inputs=inputs, replays=replays: replays.run(inputs), pool.device, scale.seconds)
            yield _row(title, name, with_graph, reading, work)
            without = _time(
                lambda inputs=inputs, backend=backend: network.forward(inputs, pool.planes, backend),
                pool.device,
                scale.seconds,
            )
            yield _row(f"{title}, no graph", name, without, reading, work)
        for tokens, before in scale.prefill:
            inputs = pool.inputs([(0, before, before + tokens)], config.vocab_size)
            work = 2 * (numbers - head) * tokens + 2 * head
            work += config.num_layers * _attention_work(config, tokens, before)
            milliseconds = _time(
                lambda inputs=inputs, backend=backend: network.forward(inputs, pool.planes, backend),
                pool.device,
                scale.seconds,
            )
            reading = numbers * scale.dtype.itemsize / bandwidth
            yield _row(f"prefill {tokens} after {before}", name, milliseconds, reading, work / rate)


def _row(title: str, backend: str, milliseconds: float, reading: float, work: float) -> Row:
    limit = "bandwidth" if reading >= work else "matrix rate"
    return Row(title, backend, milliseconds, max(reading, work), limit)


def _fitting_layers(scale: Scale, device: torch.device) -> int:
    """As many layers as the card's memory holds beside a pool of the same depth."""
    config = scale.config
    if device.type == "cpu":
        return config.num_layers
    shapes = expected_tensors(replace(config, num_layers=1))
    per_layer = sum(shape[0] * shape[-1] for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    per_layer = per_layer * scale.dtype.itemsize + _kv_bytes(config, scale.dtype, scale.pool_tokens)
    around = 2 * config.vocab_size * config.hidden_size * scale.dtype.itemsize + 2**32
    return max(1, min(config.num_layers, int((0.95 * torch.cuda.mem_get_info(device)[0] - around) // per_layer)))


def _print_rows(rows: list[Row]) -> None:
    print("\n| case | backend | ms | floor, ms | of the limit | by |\n|---|---|---:|---:|---:|---|")
    for row in rows:
        times = f"{digits(row.milliseconds)} | {digits(row.floor)} | {row.share:.0%}"
        print(f"| {row.name} | {row.backend} | {times} | {row.limit} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="in miniature: that the script works, not how fast")
    parser.add_argument("--layers", type=int, help="of the timed network; as many as fit unless given")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.smoke:
        parser.error("there is no CUDA GPU here; --smoke runs the script in miniature")
    scale = SMOKE if arguments.smoke else FULL
    began = time.monotonic()
    with torch.inference_mode():
        document = run(scale, device, arguments.layers)
    document["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(document))
    return 0 if all(check["ok"] for check in document["attention"] + document["graphs"]) else 1


def run(scale: Scale, device: torch.device, layers: int | None = None) -> dict[str, Any]:
    """All of it; returns the JSON document."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    bandwidth, rate = limits = measure_limits(scale, device)
    print(f"{card}: copies {bandwidth / 1e9:.3g} TB/s, multiplies {rate / 1e9:.3g} Tflop/s in {str(scale.dtype)[6:]}")
    attention, graphs = compare_attention(scale, device), compare_graphs(scale, device)
    for check in attention + graphs:
        print(("ok    " if check["ok"] else "WRONG "), ", ".join(f"{key} {value}" for key, value in check.items()))
    config = replace(scale.config, num_layers=layers or _fitting_layers(scale, device))
    pool = Pool(config, scale, scale.dtype, device)
    rows = list(time_attention(scale, pool, config, limits))
    network = Network(config, RandomWeights(config, scale.dtype, device), device=device, dtype=scale.dtype)
    rows += time_steps(scale, pool, network, limits)
    _print_rows(rows)
    return {
        "benchmark": "gpu",
        "card": card,
        "machine": hardware(),
        "layers": config.num_layers,
        "bytes_per_second": bandwidth * 1e3,
        "flop_per_second": rate * 1e3,
        "attention": attention,
        "graphs": graphs,
        "results": [{**asdict(row), "share": round(row.share, 4)} for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
