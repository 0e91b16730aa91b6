"""Quantized weights in panels (drawn in csrc/quantized.c): the file's own numbers and scales, moved, not changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from model.cpu.library import GROUP, PANEL, QUANTIZED_KINDS, Library
from model.cpu.memory import Arena
from model.quantized import QuantizedTensor


class QuantizedPanels:
    """Panels of one or several matrices side by side, each of its own kind."""

    def __init__(self, library: Library, arena: Arena, parts: Sequence[QuantizedTensor]) -> None:
        """`parts` are of one depth; each but the last has whole panels of rows."""
        groups = parts[0].depth // GROUP
        panels = [-(-len(part.data) // PANEL) for part in parts]
        sizes = np.repeat([groups * library.group_bytes(part.kind) for part in parts], panels)
        ends = np.cumsum(sizes, dtype=np.int64)
        self.data = arena.empty((int(ends[-1]),), torch.uint8)
        self.panel_at: NDArray[np.int64] = ends - sizes
        self.kind = np.repeat([int(part.kind) for part in parts], panels).astype(np.uint8)
        first = 0
        for part, count in zip(parts, panels, strict=True):
            rows = np.ascontiguousarray(part.data)
            at = self.data.data_ptr() + int(self.panel_at[first])
            library.pack_quantized(part.kind, rows.ctypes.data, len(rows), groups, at)
            first += count


def can_pack(parts: Sequence[QuantizedTensor | None]) -> TypeGuard[Sequence[QuantizedTensor]]:
    """Whether all parts are of kinds that the backend widens, in whole groups and panels."""
    return all(
        part is not None
        and part.kind in QUANTIZED_KINDS
        and part.depth % GROUP == 0
        and (part is parts[-1] or len(part.data) % PANEL == 0)
        for part in parts
    )


def interleave_rows(gate: QuantizedTensor | None, up: QuantizedTensor | None) -> QuantizedTensor | None:
    """As pack.interleave, of whole panels of one kind; None if they are not."""
    if gate is None or up is None or gate.kind != up.kind or len(gate.data) % PANEL or gate.data.shape != up.data.shape:
        return None
    half = PANEL // 2
    pairs = [part.data.reshape(-1, half, part.data.shape[1]) for part in (gate, up)]
    return QuantizedTensor(gate.kind, np.stack(pairs, axis=1).reshape(-1, gate.data.shape[1]))
