"""Quantized weights in panels (drawn in csrc/quantized.c): the file's own numbers and scales, moved, not changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from model.cpu.library import PANEL
from model.quantized import TAKEN_APART, Bytes, QuantizedTensor, take_apart

GROUP = 32


class QuantizedPanels:
    """Panels of one or several matrices side by side, each of its own kind."""

    def __init__(self, parts: Sequence[QuantizedTensor]) -> None:
        """`parts` are of one depth; each but the last has whole panels of rows."""
        panels = [_panels(part) for part in parts]
        sizes = [part.nbytes // len(part) for part in panels for _ in part]
        self.data: Bytes = np.concatenate([part.reshape(-1) for part in panels])
        self.panel_at: NDArray[np.int64] = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self.kind = np.repeat([int(part.kind) for part in parts], [len(part) for part in panels]).astype(np.uint8)


def pack_quantized(parts: Sequence[QuantizedTensor | None]) -> QuantizedPanels | None:
    """None unless all parts are of kinds that the backend widens, in whole groups and panels."""
    whole = [
        part
        for part in parts
        if part is not None
        and part.kind in TAKEN_APART
        and part.depth % GROUP == 0
        and (part is parts[-1] or len(part.data) % PANEL == 0)
    ]
    return QuantizedPanels(whole) if len(whole) == len(parts) else None


def interleave_rows(gate: QuantizedTensor | None, up: QuantizedTensor | None) -> QuantizedTensor | None:
    """As pack.interleave, of whole panels of one kind; None if they are not."""
    if gate is None or up is None or gate.kind != up.kind or len(gate.data) % PANEL or gate.data.shape != up.data.shape:
        return None
    half = PANEL // 2
    pairs = [part.data.reshape(-1, half, part.data.shape[1]) for part in (gate, up)]
    return QuantizedTensor(gate.kind, np.stack(pairs, axis=1).reshape(-1, gate.data.shape[1]))


def _panels(tensor: QuantizedTensor) -> Bytes:
    """[panels, bytes of a panel]"""
    missing = -len(tensor.data) % PANEL
    if missing:  # rows of zeros have scales of zero
        padded = np.concatenate((tensor.data, np.zeros((missing, tensor.data.shape[1]), dtype=np.uint8)))
        tensor = QuantizedTensor(tensor.kind, padded)
    taken = take_apart(tensor)
    numbers = taken.numbers.reshape(-1, PANEL, tensor.depth // GROUP, GROUP)
    fields = [_bytes(numbers)] if tensor.kind is Kind.Q8_0 else [_nibbles(numbers & 15)]
    if tensor.kind is Kind.Q6_K:
        fields.append(_twos(numbers >> 4))
    fields += [_lines(each.reshape(-1, PANEL, numbers.shape[2])) for each in (*taken.halves, *taken.scales)]
    panels = np.concatenate(fields, axis=-1)  # [panels, groups, bytes of a group]
    return panels.reshape(len(panels), -1)


def _lines(values: NDArray[Any]) -> Bytes:
    """[panels, columns, groups, ...] -> [panels, groups, bytes]: what all columns have in a group, side by side."""
    return np.ascontiguousarray(np.moveaxis(values, 1, -1)).view(np.uint8).reshape(len(values), values.shape[2], -1)


def _words(values: Bytes, bits: int) -> Bytes:
    """Numbers of `bits` bits, the first of each word lowest, as lines of words."""
    per_byte = 8 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // per_byte), dtype=np.uint8)
    for index in range(per_byte):
        packed |= values[..., index::per_byte] << np.uint8(bits * index)
    return _lines(packed.view(np.uint32))


def _nibbles(numbers: Bytes) -> Bytes:
    return _words(numbers, 4)


def _twos(numbers: Bytes) -> Bytes:
    return _words(numbers, 2)


def _bytes(numbers: Bytes) -> Bytes:
    return _words(np.ascontiguousarray(numbers), 8)
