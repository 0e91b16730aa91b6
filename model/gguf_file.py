"""One GGUF file, memory-mapped: its metadata and its tensors, dequantized one at a time."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from model.cpu.dequantize import dequantize
from model.errors import BadConfig, BadWeights, UnsupportedModel
from model.quantized import QuantizedTensor

UNQUANTIZED = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})

SUPPORTED_TYPES = UNQUANTIZED | frozenset(
    {
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        # Files named Q4_K hold these too: Q6_K where precision matters, Q5_0 where a row is no multiple of 256.
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    }
)


class GgufFile:
    """Metadata by key and tensors by name of one little-endian GGUF file.

    Raises:
        BadWeights: the file is truncated, damaged or no GGUF.
        BadConfig: split.count is no number.
        UnsupportedModel: big-endian, one part of a split model, or a quantization that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _HeaderReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error, OSError) as error:
            raise BadWeights(f"{path} is not a complete GGUF file: {error}") from error
        if reader.byte_order != "I":
            raise UnsupportedModel(f"{path} was written for the other byte order.")
        self._fields = reader.fields
        self.keys = tuple(key for key in reader.fields if not key.startswith("GGUF."))
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        parts = self.get("split.count", 1)
        if not isinstance(parts, int) or isinstance(parts, bool):
            raise BadConfig(f"{path}: split.count is {shorten(parts)}, expected an integer.")
        if parts > 1:
            raise UnsupportedModel(f"{path} is one part of a split model; merge it first with `gguf-split --merge`.")
        for tensor in reader.tensors:
            if tensor.tensor_type not in SUPPORTED_TYPES:
                supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
                raise UnsupportedModel(
                    f"{path}: tensor {tensor.name} is quantized as {tensor.tensor_type.name}. Supported: {supported}."
                )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: a scalar, a string, a list of numbers; lists of strings (the vocabulary) come out empty."""
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError, TypeError) as error:
            raise BadConfig(f"{self.path}: the value of {key} cannot be read: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the dequantized tensor, slowest dimension first as in torch."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def nbytes(self, name: str) -> int:
        return int(self.tensors[name].n_bytes)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """A copy of the matrix as it is stored; None if its values are stored one by one."""
        stored = self.tensors[name]
        if stored.tensor_type in UNQUANTIZED:
            return None
        return QuantizedTensor(stored.tensor_type, np.array(stored.data, dtype=np.uint8))

    def tensor(self, name: str, quantized: QuantizedTensor | None = None) -> torch.Tensor:
        """The tensor dequantized to float32, in memory of its own (the file may change or vanish while serving).
        `quantized` is what `quantized(name)` gave, so that the file need not be read again."""
        stored = self.tensors[name]
        # An array, since each slice of a memmap would cost as much as computing with it.
        data = stored.data.view(np.ndarray) if quantized is None else quantized.data
        is_quantized = stored.tensor_type not in UNQUANTIZED
        values = (dequantize if is_quantized else gguf.quants.dequantize)(data, stored.tensor_type)
        if np.shares_memory(values, stored.data):
            values = values.copy()
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(self.shape(name))


class _HeaderReader(GGUFReader):
    """GGUFReader keeps several objects for every token of the vocabulary, which is most of the time to open a file.

    The network needs no strings, so lists of them are stepped over, and lists of numbers are taken in one piece.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            parts: tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]
            parts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item_type = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            return self._skip_strings(start, count) - orig_offs, [], [], [GGUFValueType.ARRAY, item_type]
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is None:
            raise ValueError(f"metadata holds a list of {item_type.name}")
        values = self._get(start, scalar, count)
        if len(values) != count:
            raise ValueError("the metadata is cut off")
        return 12 + int(values.nbytes), [values], [0], [GGUFValueType.ARRAY, item_type]

    def _skip_strings(self, offset: int, count: int) -> int:
        order = "<" if self.byte_order == "I" else ">"
        length = struct.Struct(f"{order}Q")
        buffer = self.data.data
        for _ in range(count):
            offset += 8 + int(length.unpack_from(buffer, offset)[0])
        return offset


def shorten(value: object) -> str:
    """A metadata value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
