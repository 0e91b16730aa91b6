"""GGUF's quantized rows to floats: by the C library where it is built and knows the kind, else by the `gguf` package,
which is several times slower. The values are the same bit for bit."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from model.cpu.choose import NotApplicable, find_backend
from model.cpu.library import GROUP, QUANTIZED_KINDS, Library

LONG_ROW_BYTES = 16 * 1024


def dequantize(rows: NDArray[np.uint8], kind: Kind) -> NDArray[np.float32]:
    """rows [..., bytes of a row] of whole quantization blocks -> [..., values of a row]."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*rows.shape[:-1], rows.shape[-1] // size * values)
    library = _library() if kind in QUANTIZED_KINDS else None
    if library is None:
        plain: NDArray[np.float32] = gguf.quants.dequantize(_in_long_rows(rows), kind)
        return plain.reshape(shape)
    rows = np.ascontiguousarray(rows)
    out = np.empty(shape, dtype=np.float32)
    library.dequantize(kind, rows.ctypes.data, out.size // GROUP, out.ctypes.data)
    return out


@cache
def _library() -> Library | None:
    try:
        return find_backend(torch.float32, torch.device("cpu")).library
    except NotApplicable:
        return None


def _in_long_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same bytes in fewer rows, of whole quantization blocks still: gguf takes 16 rows at a time, and its calls are
    what costs on short ones. Rows stay short enough for what it makes of 16 of them to stay in a cache."""
    count, length = rows.reshape(-1, rows.shape[-1]).shape
    while count % 2 == 0 and count > 16 and length < LONG_ROW_BYTES:
        count, length = count // 2, length * 2
    return rows.reshape(count, length)
