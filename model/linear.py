"""The matrix products of the network: one place, because their row counts decide their bits (see model/numerics.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from model.inputs import AdapterRows
from model.numerics import pad_rows, padded_rows


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b, with W [out_features, in_features] as checkpoints store it; adapters know it by its name."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = ""

    def __call__(self, rows: torch.Tensor, adapters: Sequence[AdapterRows] = ()) -> torch.Tensor:
        """rows [n, in_features] -> [n, out_features]; a row's bits do not depend on n or on the other rows.

        What an adapter adds is computed on its own rows, taken together and padded anew, so that neither they nor the
        base model's rows can tell who else is in the step.

        Callers pad once (`pad_rows`) and keep the padded rows from product to product; rows that come unpadded are
        a bug of ours, since they would be right and yet not the same.
        """
        assert rows.shape[0] == padded_rows(rows.shape[0], rows.device), "row count is not padded"
        output = self._product(rows)
        for each in adapters:
            delta = each.adapter.deltas.get(self.name)
            if delta is not None:
                output.index_add_(0, each.rows, delta(pad_rows(rows[each.rows]))[: each.rows.shape[0]])
        return output

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PrepackedLinear(Linear):
    """The same with the weight in the order that oneDNN multiplies it in: 1.2 to 3 times as fast at few rows."""

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product


def prepack(linear: Linear) -> Linear:
    """`linear`, prepacked where oneDNN multiplies its dtype on this CPU; its own weight is not kept then."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype not in _prepacked_dtypes():
        return linear
    return PrepackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT), linear.bias, linear.name)


_ROWS_HINT = 16  # rows that the order is chosen for


@functools.cache
def _prepacked_dtypes() -> frozenset[torch.dtype]:
    """Found out by trying: oneDNN wants other instructions for each dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    found = set()
    for dtype in (torch.float32, torch.bfloat16):
        try:
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=dtype), _ROWS_HINT)
        except RuntimeError:
            continue
        found.add(dtype)
    return frozenset(found)


def fuse(parts: Sequence[Linear], name: str = "") -> Linear:
    """One product in place of several on the same input: outputs side by side, in the order of `parts`."""
    biases = [part.bias for part in parts if part.bias is not None]
    weight = torch.cat([part.weight for part in parts])
    return Linear(weight, torch.cat(biases) if biases else None, name)
