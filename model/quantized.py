"""Quantized tensors as a GGUF file ships them, taken apart: whole numbers, scales and offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Bytes = NDArray[Any]  # uint8; numpy's types do not follow shifts and masks


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix as it lies in its file: one row of `data` for each of its rows."""

    kind: Kind
    data: Bytes  # [rows, bytes of a row]

    @property
    def depth(self) -> int:
        """Values in a row."""
        values, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(self.data.shape[1] // size * values)

    def blocks(self) -> Bytes:
        """[rows, blocks of a row, bytes of a block]"""
        size = gguf.GGML_QUANT_SIZES[self.kind][1]
        return self.data.reshape(len(self.data), -1, size)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a kind is made of. `numbers` are the whole numbers [rows, depth] without any offset, from 0 (Q8_0: signed).

    `halves` are float16 bits and `scales` bytes, [rows, groups of 32 values] for each, in the order in which csrc lists
    them; scales that come for 16 values are two.
    """

    numbers: Bytes
    halves: tuple[NDArray[np.uint16], ...]
    scales: tuple[Bytes, ...] = ()


def take_apart(tensor: QuantizedTensor) -> Parts:
    """Raises KeyError for a kind that is not in TAKEN_APART."""
    return TAKEN_APART[tensor.kind](tensor.blocks())


def _half(blocks: Bytes, at: int) -> NDArray[np.uint16]:
    """The float16 at byte `at` of each block, as bits."""
    half: NDArray[np.uint16] = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.uint16)[..., 0]
    return half


def _flat(values: Bytes) -> Bytes:
    return values.reshape(len(values), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] -> [..., 2, n]: all low halves, then all high ones."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(_flat(_nibbles(blocks[..., 2:])), (_half(blocks, 0),))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(_flat(_nibbles(blocks[..., 4:])), (_half(blocks, 0), _half(blocks, 2)))


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(_flat(blocks[..., 2:]), (_half(blocks, 0),))


def _q4_k(blocks: Bytes) -> Parts:
    """256 values with one d and one m, and 6 bits of scale and of offset for each 32 of them."""
    low, offset_low, high = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), axis=-1)
    offsets = np.concatenate((offset_low & 0x3F, (high >> 4) | ((offset_low >> 2) & 0x30)), axis=-1)
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    halves = tuple(np.repeat(_half(blocks, at), 8, axis=-1) for at in (0, 2))
    return Parts(_flat(numbers), halves, (_flat(scales), _flat(offsets)))


def _q6_k(blocks: Bytes) -> Parts:
    """256 values with one d, and a signed byte of scale for each 16 of them."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 8, 32)
    packed = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = (packed >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    numbers = low | (high.reshape(low.shape) << np.uint8(4))
    scales = blocks[..., 192:208]
    d = np.repeat(_half(blocks, 208), 8, axis=-1)
    return Parts(_flat(numbers), (d,), (_flat(scales[..., ::2]), _flat(scales[..., 1::2])))


TAKEN_APART: dict[Kind, Callable[[Bytes], Parts]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
}
