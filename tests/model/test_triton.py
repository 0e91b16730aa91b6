"""The Triton backend: its plan, and its kernels as Triton's interpreter runs them on CPU; on a GPU, as compiled.

The interpreter's 16-bit products are replaced by float32 ones (WIDEN), so bits and rounding in 16 bits are a GPU's
affair (benchmarks/gpu.py); what is shown here is which numbers are read, in which order they are added, and to where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention import triton_paged
from model.attention.torch_reference import TorchReference
from model.attention.triton_kernels import SEGMENT, TILE_SLOTS
from model.attention.triton_paged import HIGH, LOW, TritonAttention
from tests.model.test_attention import Layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SPANS = [(0, 129, 130), (1, 0, 21), (2, 62, 66), (0, 17, 20), (3, 0, 1)]
LENGTHS = [130, 21, 66, 1]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a quarter and products of half the size, so that short contexts have several."""
    monkeypatch.setattr(triton_paged, "SEGMENT", SEGMENT // 4)
    monkeypatch.setattr(triton_paged, "TILE_SLOTS", TILE_SLOTS // 2)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with numpy's BLAS, in which a row's bits depend on where among others it stands; a
    GPU's matrix units know no such thing. So here the sums are taken one product after the other."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    def dot(_: object, a: Any, b: Any, initial: Any, *options: object) -> Any:
        total = initial.data.copy()
        for index in range(a.data.shape[1]):
            total += a.data[:, index : index + 1] * b.data[index : index + 1]
        return interpreter.TensorHandle(total, initial.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _layer(heads: int, kv_heads: int, head_dim: int, block_size: int, lengths: list[int] = LENGTHS) -> Layer:
    layer = Layer(lengths, heads, kv_heads, head_dim, block_size, DEVICE)
    layer.fill()
    return layer


def test_equals_the_reference_at_full_size() -> None:
    layer = _layer(3, 1, 64, 16, [SEGMENT + 9])
    spans = [(0, SEGMENT - 2, SEGMENT + 9)]
    expected = layer.attend(TorchReference(16), spans)
    assert torch.allclose(layer.attend(TritonAttention(16, 132), spans), expected, atol=1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "processors"),
    [(4, 2, 64, 16, 1), (3, 1, 96, 4, 132), (18, 1, 24, 32, 1), (2, 2, 128, 128, 132), (2, 2, 8, 1, 132)],
)
def test_equals_the_reference(heads: int, kv_heads: int, head_dim: int, block_size: int, processors: int) -> None:
    layer = _layer(heads, kv_heads, head_dim, block_size)
    expected = layer.attend(TorchReference(block_size), SPANS)
    output = layer.attend(TritonAttention(block_size, processors), SPANS)
    assert torch.allclose(output, expected, atol=1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_the_reference_in_16_bits(dtype: torch.dtype) -> None:
    layer = _layer(4, 2, 64, 16).to(dtype)
    expected = layer.attend(TorchReference(16), SPANS).float()
    output = layer.attend(TritonAttention(16, 1), SPANS)
    assert output.dtype == dtype
    # Weights are rounded too before they are multiplied, and the result once more.
    assert torch.allclose(output.float(), expected, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("small", "row_by_row")
@pytest.mark.parametrize(("processors", "high_rows"), [(1, 32), (2, 64), (132, 64)])
def test_bits_do_not_depend_on_spans_company_or_how_segments_are_dealt_out(
    processors: int, high_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three segments, computed row by row, in chunks, with gaps and beside others: always the same bits."""
    if DEVICE.type == "cpu":  # on a GPU heights may differ in their last bits
        monkeypatch.setattr(triton_paged, "high_tiling", lambda dtype, width: replace(HIGH, rows=high_rows))
    segment = triton_paged.SEGMENT
    length = 2 * segment + 5
    layer = _layer(2, 1, 16, 16, [length, 40])
    first = segment - 12
    whole = layer.attend(TritonAttention(16, 1), [(0, first, length)])
    schedules = [
        [(0, length - 1, length), (1, 39, 40)],
        [(1, 0, 40), (0, segment - 1, segment + 2), (0, length - 30, length)],
        [(0, segment - 2, segment), (0, segment + 7, segment + 24), (0, 2 * segment - 1, 2 * segment + 1)],
    ]
    for spans in schedules:
        output = layer.attend(TritonAttention(16, processors), spans)
        for (request, start, end), rows in zip(
            spans, output.split([end - start for _, start, end in spans]), strict=True
        ):
            if request == 0:
                assert torch.equal(rows, whole[start - first : end - first]), (start, end)


@pytest.mark.usefixtures("small")
def test_both_ways_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles share their segments out; many do not. Else the test above would compare one way with itself."""
    layer = _layer(4, 2, 16, 16)
    taken = []
    for name in ("_whole", "_segments"):
        plain = getattr(TritonAttention, name)
        monkeypatch.setattr(
            TritonAttention, name, lambda *args, name=name, plain=plain: (taken.append(name), plain(*args))
        )
    for processors in (1, 132):
        layer.attend(TritonAttention(16, processors), [(0, 129, 130), (1, 20, 21), (2, 65, 66), (3, 0, 1)])
    assert taken == ["_whole", "_segments"]


def test_write_touches_the_steps_slots_only() -> None:
    spans = [(0, 10, 20), (1, 0, 3)]
    layer, other = _layer(2, 2, 24, 16), _layer(2, 2, 24, 16)
    for each in (layer, other):
        each.pool.fill_(torch.nan)
    layer.attend(TritonAttention(16, 1), [(0, 0, 20)])  # later spans read what this writes
    other.attend(TorchReference(16), [(0, 0, 20)])
    layer.attend(TritonAttention(16, 1), spans)
    other.attend(TorchReference(16), spans)
    assert torch.equal(layer.pool.nan_to_num(-1.0), other.pool.nan_to_num(-1.0))


def test_a_slot_of_minus_one_is_nowhere() -> None:
    layer = _layer(2, 2, 16, 16)
    before = layer.pool.clone()
    new = torch.ones(2, 2, 16, device=DEVICE)
    slots = torch.tensor([-1, layer.tables[0][0] * 16 + 3], device=DEVICE)
    triton_paged.write_slots(layer.planes, (new, 2 * new), slots)
    changed = (layer.pool.nan_to_num(-1.0) != before.nan_to_num(-1.0)).nonzero()
    assert {tuple(where) for where in changed[:, [0, 1, 2, 4]].tolist()} == {
        (layer.tables[0][0], 1, plane, 3) for plane in (0, 1)
    }


def test_slots_never_written_are_not_read() -> None:
    """The pool of the tests is full of NaN where nothing was written: block 0, and the ends of last blocks."""
    layer = _layer(2, 2, 16, 128)
    assert layer.pool.isnan().any()
    assert layer.attend(TritonAttention(128, 132), SPANS).isfinite().all()


@pytest.mark.usefixtures("small")
def test_tiles_cover_each_row_once_and_the_longest_contexts_come_first() -> None:
    layer = _layer(6, 1, 16, 16)
    _, tilings = triton_paged._plan(layer.inputs(SPANS), 6, HIGH)
    assert [tiles.tiling for tiles in tilings] == [LOW, HIGH]
    covered = [
        (span, row)
        for tiles in tilings
        for span, first, _ in tiles.table.tolist()
        for row in range(first, min(first + tiles.tiling.rows, (SPANS[span][2] - SPANS[span][1]) * 6))
    ]
    assert sorted(covered) == [
        (span, row) for span, (_, start, end) in enumerate(SPANS) for row in range((end - start) * 6)
    ]
    assert tilings[0].table.tolist() == [[0, 0, 0], [4, 0, 3]]  # the first has three segments
    assert tilings[1].table.tolist() == [[2, 0, 0], [1, 64, 2], [3, 0, 3], [1, 0, 4]]


def test_partials_do_not_overlap() -> None:
    layer = _layer(6, 1, 16, 16, [700, 513, 40])
    spans = [(0, 650, 700), (1, 512, 513), (2, 0, 40)]
    _, tilings = triton_paged._plan(layer.inputs(spans), 6, HIGH)
    for tiles in tilings:
        used = []
        for span, row, partial in tiles.table.tolist():
            _, start, end = spans[span]
            last = min(end, start + (row + tiles.tiling.rows - 1) // 6 + 1)
            used += range(partial, partial + -(-last // SEGMENT))
        assert sorted(used) == list(range(tiles.partials))


@pytest.mark.parametrize(
    ("heads_per_kv", "expected"),
    [
        (4, [[0, 0, 0], [1, 0, 3], [2, 0, 5]]),
        (20, [[0, 0, 0], [0, 16, 3], [1, 0, 6], [1, 16, 8], [2, 0, 10], [2, 16, 11]]),
    ],
)
def test_a_step_of_single_tokens_is_planned_on_the_device(heads_per_kv: int, expected: list[list[int]]) -> None:
    layer = _layer(heads_per_kv, 1, 16, 16, [700, 512, 40])
    inputs = layer.inputs([(0, 699, 700), (1, 511, 512), (2, 3, 4)])
    bounds, (tiles,) = triton_paged._plan(inputs, heads_per_kv, HIGH)
    assert bounds.tolist() == [0, 1, 2, 3]
    assert tiles.table.tolist() == expected
    assert tiles.segments == 3
    assert tiles.partials >= 6 * len(expected) // 3


@pytest.mark.parametrize("block_size", [0, 3, 24, 256])
def test_block_sizes_that_are_no_power_of_two_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        TritonAttention(block_size, 1)


def test_what_does_not_fit_the_registers_goes_in_low_tiles() -> None:
    assert triton_paged.high_tiling(torch.bfloat16, 128) == HIGH
    assert triton_paged.high_tiling(torch.float32, 64) == LOW
    assert triton_paged.high_tiling(torch.float16, 256) == LOW


@pytest.mark.parametrize(
    ("capability", "shared"),
    [
        pytest.param(80, 163 * 1024, marks=pytest.mark.slow),
        pytest.param(89, 99 * 1024, marks=pytest.mark.slow),
        (90, 227 * 1024),
    ],
)
def test_kernels_compile_for_gpus_that_are_not_here(capability: int, shared: int, tmp_path: Path) -> None:
    """All the way to machine code; and a program's shared memory is what such a GPU has, or less."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compile_triton", str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < max(found.values()) <= shared
