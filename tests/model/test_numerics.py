"""The operations under the network, one by one: no row's bits depend on the other rows, on CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from model.linear import Linear, fuse
from model.numerics import ROW_MULTIPLE, pad_rows, padded_rows, rms_norm, silu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
Rows = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    torch.set_num_threads(count)
    return count


def _differs(function: Rows, rows: torch.Tensor, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(count, offset) of every run of rows whose results differ from those computed among all rows."""
    whole = function(rows)
    found = []
    for count in counts:
        for offset in {0, 5, (len(rows) - count) // 2, len(rows) - count}:
            if not torch.equal(function(rows[offset : offset + count].clone()), whole[offset : offset + count]):
                found.append((count, offset))
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (1536, 576), (64, 200), (48, 80)])
def test_padded_products_do_not_depend_on_the_row_count(dtype: torch.dtype, inner: int, outer: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    bias = torch.randn(outer, generator=generator).to(dtype)
    rows = torch.randn(272, inner, generator=generator).to(dtype)
    for linear in (Linear(weight), Linear(weight, bias)):

        def padded(part: torch.Tensor, linear: Linear = linear) -> torch.Tensor:
            return linear(pad_rows(part))[: len(part)]

        assert _differs(padded, rows, (1, 2, 3, 5, 7, 11, 16, 17, 100, 267)) == []


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 20, 64, 576, 1536])
def test_elementwise_and_sums_do_not_depend_on_the_row_count(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = (3 * torch.randn(272, width, generator=generator)).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)

    def softmax_parts(part: torch.Tensor) -> torch.Tensor:
        weights = (part.float() - part.float().amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    functions: list[Rows] = [silu, lambda part: rms_norm(part, weight, 1e-5), softmax_parts]
    for function in functions:
        assert _differs(function, rows, (1, 2, 3, 5, 7, 16, 33, 100, 267)) == []


def test_silu_is_silu() -> None:
    values = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([-1e4, 1e4, 0.0])))
    assert torch.allclose(silu(values), functional.silu(values), rtol=1e-6, atol=1e-30)


def test_padding() -> None:
    tile = ROW_MULTIPLE
    assert tile % 4 == 0
    assert [padded_rows(count, CPU) for count in (0, 1, tile, tile + 1)] == [0, tile, tile, 2 * tile]
    assert padded_rows(1, torch.device("cuda")) == 1
    rows = torch.ones(tile, 3)
    assert pad_rows(rows) is rows
    assert pad_rows(rows[:2]).shape == (tile, 3)
    assert pad_rows(rows[:2]).sum() == 6


def test_unpadded_rows_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="not padded"):
        Linear(torch.ones(2, 2))(torch.ones(3, 2))


def test_fused_products_lie_side_by_side() -> None:
    first, second = (Linear(torch.randn(4, 8), torch.randn(4)) for _ in range(2))
    rows = torch.randn(16, 8)
    both = fuse([first, second])(rows)
    assert torch.allclose(both, torch.cat((first(rows), second(rows)), dim=1), atol=1e-5)
