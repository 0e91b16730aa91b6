"""The backends themselves: the reference against a naive softmax, the CUDA one as far as it can be planned on CPU."""

from __future__ import annotations

import random

import pytest
import torch

from model.attention import varlen
from model.attention.base import Attention
from model.attention.choose import choose_attention
from model.attention.slots import SlotWriter
from model.attention.torch_reference import TorchReference
from model.inputs import StepInputs

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Layer:
    """One layer's planes over requests of given lengths, all of whose K/V are written but for the spans' own."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, device: torch.device = CPU
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.block_size = block_size
        self.keys = [torch.randn(length, kv_heads, head_dim, generator=generator).to(device) for length in lengths]
        self.values = [torch.randn(length, kv_heads, head_dim, generator=generator).to(device) for length in lengths]
        self.queries = [torch.randn(length, heads, head_dim, generator=generator).to(device) for length in lengths]
        counts = [-(-length // block_size) for length in lengths]
        ids = random.Random(0).sample(range(1, sum(counts) + 1), sum(counts))
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        # Three layers of which this is the middle one, so that the planes are views with the strides of a real pool.
        shape = (sum(counts) + 1, 3, 2, kv_heads, block_size, head_dim)
        self.pool = torch.full(shape, torch.nan, device=device)
        self.planes = (self.pool[:, 1, 0], self.pool[:, 1, 1])

    def to(self, dtype: torch.dtype) -> Layer:
        self.pool = self.pool.to(dtype)
        self.planes = (self.pool[:, 1, 0], self.pool[:, 1, 1])
        for tensors in (self.keys, self.values, self.queries):
            tensors[:] = [tensor.to(dtype) for tensor in tensors]
        return self

    def fill(self) -> None:
        for keys, values, table in zip(self.keys, self.values, self.tables, strict=True):
            for position in range(len(keys)):
                where = table[position // self.block_size], slice(None), position % self.block_size
                self.planes[0][where], self.planes[1][where] = keys[position], values[position]

    def inputs(self, spans: list[tuple[int, int, int]]) -> StepInputs:
        flat = [(request, position) for request, start, end in spans for position in range(start, end)]
        width = max(len(self.tables[request]) for request, _, _ in spans)
        tables = [self.tables[request] + [0] * (width - len(self.tables[request])) for request, _, _ in spans]
        size, device = self.block_size, self.pool.device
        slots = [self.tables[request][position // size] * size + position % size for request, position in flat]
        return StepInputs(
            token_ids=torch.zeros(len(flat), dtype=torch.int64, device=device),
            positions=torch.tensor([position for _, position in flat], device=device),
            slots=torch.tensor(slots, device=device),
            q_len=tuple(end - start for _, start, end in spans),
            kv_len=tuple(end for _, _, end in spans),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        )

    def attend(self, backend: Attention, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        backend.prepare(self.inputs(spans))
        flat = [(request, slice(start, end)) for request, start, end in spans]
        keys, values, queries = (
            torch.cat([tensors[request][part] for request, part in flat])
            for tensors in (self.keys, self.values, self.queries)
        )
        backend.write(self.planes, (keys, values))
        return backend.attend(self.planes, queries)

    def naive(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        outputs = []
        for request, start, end in spans:
            for position in range(start, end):
                query = self.queries[request][position].double()
                group = query.shape[0] // self.keys[request].shape[1]
                keys = self.keys[request][: position + 1].double().repeat_interleave(group, dim=1)
                values = self.values[request][: position + 1].double().repeat_interleave(group, dim=1)
                weights = torch.einsum("hd,khd->hk", query, keys).mul(query.shape[-1] ** -0.5).softmax(-1)
                outputs.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(outputs)


SPANS = [(0, 300, 301), (1, 0, 45), (2, 128, 130), (0, 17, 30), (3, 0, 1), (2, 140, 160)]
SHAPES = [(4, 4, 16), (9, 3, 64), (8, 1, 24), (6, 2, 128)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_reference_equals_a_naive_softmax(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    layer = Layer([301, 45, 160, 1], heads, kv_heads, head_dim, block_size)
    layer.fill()
    output = layer.attend(TorchReference(block_size), SPANS)
    assert torch.allclose(output.double(), layer.naive(SPANS), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_computes_in_float32_whatever_the_dtype(dtype: torch.dtype) -> None:
    layer = Layer([301, 45, 160, 1], 9, 3, 64, 16).to(dtype)
    layer.fill()
    output = layer.attend(TorchReference(16), SPANS)
    assert output.dtype == dtype
    assert torch.allclose(output.double(), layer.naive(SPANS), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_write_touches_the_steps_slots_only() -> None:
    layer = Layer([40, 20], 2, 2, 8, 16)
    layer.attend(TorchReference(16), [(0, 10, 20), (1, 0, 3)])
    written = ~torch.isnan(layer.pool)
    assert not written[:, (0, 2)].any()
    slots = written[:, 1, 0, 0, :, 0].nonzero().tolist()
    table, other = layer.tables
    expected = [[table[p // 16], p % 16] for p in range(10, 20)] + [[other[0], p] for p in range(3)]
    assert slots == sorted(expected)


def test_slots_map_to_block_and_offset() -> None:
    plane = torch.zeros(3, 1, 4, 1)
    SlotWriter(torch.tensor([5, 11]), 4).write((plane,), (torch.tensor([[[1.0]], [[2.0]]]),))
    assert plane.flatten().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("block_size", [0, -16, 3, 24, 256])
def test_block_sizes_that_do_not_tile_a_segment_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        TorchReference(block_size)


def test_cpu_gets_the_reference() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(choose_attention(CPU, dtype, 64, 16), TorchReference)


def test_pages_are_a_view_with_heads_side_by_side() -> None:
    layer = Layer([100], 6, 3, 64, 16)
    pages = varlen.as_pages(layer.planes[0])
    assert pages.shape == (8, 16, 3, 64)
    assert pages.data_ptr() == layer.planes[0].data_ptr()
    assert pages.stride() == (3 * 2 * 3 * 16 * 64, 64, 16 * 64, 1)


def test_row_bounds() -> None:
    assert varlen.row_bounds((4, 1, 2)) == [0, 4, 5, 7]


def test_varlen_is_told_one_row_per_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call as torch would get it: shapes, mask, splits, and the pages of the very pool that was written."""
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def record(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append((args, kwargs))
        return torch.zeros_like(query)

    monkeypatch.setattr(varlen, "current_flash_attention_impl", lambda: varlen.KERNEL)
    monkeypatch.setattr(varlen, "varlen_attn", record)
    layer = Layer([40, 20], 6, 2, 64, 16)
    assert layer.attend(varlen.VarlenAttention(16), [(0, 30, 40), (1, 19, 20)]).shape == (11, 6, 64)
    ((keys, values, bounds, cu_seq_k, max_q, max_k), options) = calls[0]
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    assert isinstance(bounds, torch.Tensor)
    assert keys.data_ptr() == layer.planes[0].data_ptr()
    assert values.data_ptr() == layer.planes[1].data_ptr()
    assert (bounds.tolist(), bounds.dtype, cu_seq_k, max_q, max_k) == ([0, 10, 11], torch.int32, None, 10, 40)
    kv_len, table = options["seqused_k"], options["block_table"]
    assert isinstance(kv_len, torch.Tensor)
    assert isinstance(table, torch.Tensor)
    assert (kv_len.tolist(), kv_len.dtype) == ([40, 20], torch.int32)
    assert (table.shape, table.dtype) == ((2, 3), torch.int32)
    assert (options["window_size"], options["num_splits"], options["enable_gqa"]) == ((-1, 0), 1, True)


@pytest.mark.gpu
@needs_cuda
def test_reference_on_cuda_equals_a_naive_softmax() -> None:
    layer = Layer([301, 45, 160, 1], 9, 3, 64, 16, torch.device("cuda"))
    layer.fill()
    output = layer.attend(TorchReference(16), SPANS)
    assert torch.allclose(output.double(), layer.naive(SPANS), atol=1e-3)


@pytest.mark.gpu
@needs_cuda
def test_varlen_equals_a_naive_softmax() -> None:
    device = torch.device("cuda")
    if not varlen.supports(device, torch.bfloat16, 64):
        pytest.skip("needs a Hopper GPU and the FA3 package")
    layer = Layer([301, 45, 160, 1], 9, 3, 64, 16, device).to(torch.bfloat16)
    layer.pool.zero_()
    layer.fill()
    output = layer.attend(varlen.VarlenAttention(16), SPANS)
    assert torch.allclose(output.double(), layer.naive(SPANS), atol=2e-2)
