"""Weights as the C backend reads them: panels of columns, words side by side (drawn in csrc/pk.h)."""

from __future__ import annotations

import torch
from torch.nn import functional

from model.cpu.library import PANEL, Library, Matrix
from model.cpu.memory import Arena
from model.cpu.quantized import QuantizedPanels


class PackedMatrix:
    """One product's weights in panels, dense or as the file has them or both, and the bias in the order of its columns;
    the memory that `struct` names."""

    def __init__(
        self,
        library: Library,
        arena: Arena,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantized: QuantizedPanels | None = None,
        *,
        dense: bool = True,
    ) -> None:
        """weight [columns, depth] in bfloat16 or float32; both are filled up with zeros to whole panels."""
        columns, depth = (padded(size) for size in weight.shape)
        self._panels = to_panels(library, arena, weight) if dense else None
        self._bias = None if bias is None else functional.pad(bias.float(), (0, columns - bias.shape[0])).contiguous()
        self._quantized = quantized
        self.struct = Matrix(columns=columns, depth=depth)
        if self._panels is not None:
            self.struct.panels = self._panels.data_ptr()
        if self._bias is not None:
            self.struct.bias = self._bias.data_ptr()
        if quantized is not None:
            self.struct.quantized = quantized.data.data_ptr()
            self.struct.panel_at = quantized.panel_at.ctypes.data
            self.struct.kind = quantized.kind.ctypes.data

    @property
    def is_quantized(self) -> bool:
        return self._quantized is not None

    def forget_quantized(self) -> None:
        self._quantized = None
        self.struct.quantized = None


def padded(size: int) -> int:
    return -(-size // PANEL) * PANEL


def to_panels(library: Library, arena: Arena, weight: torch.Tensor) -> torch.Tensor:
    """[columns, depth] -> [columns / 32, depth / 2, 32] pairs of bfloat16, or [columns / 32, depth, 32] floats."""
    in_word = 4 // weight.itemsize
    odd = weight.shape[1] % in_word
    rows = functional.pad(weight, (0, odd)) if odd else weight.contiguous()  # in whole words
    columns, depth = (padded(size) for size in weight.shape)
    panels = arena.empty((columns // PANEL, depth // in_word, PANEL), torch.int32)
    library.pack_words(rows.data_ptr(), len(rows), rows.shape[1] // in_word, depth // in_word, panels.data_ptr())
    return panels


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[n, ...] twice -> [2 n', ...]: 16 rows of gate, the same 16 of up, and so on; zeros fill up whole panels."""
    half = PANEL // 2
    missing = padded(gate.shape[0]) - gate.shape[0]
    parts = [torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) for part in (gate, up)]
    return torch.stack([part.view(-1, half, *part.shape[1:]) for part in parts], 1).flatten(0, 2)
