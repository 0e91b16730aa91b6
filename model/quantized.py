"""Quantized tensors as a GGUF file ships them."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix as it lies in its file: one row of `data` for each of its rows."""

    kind: Kind
    data: NDArray[np.uint8]  # [rows, bytes of a row]

    @property
    def depth(self) -> int:
        """Values in a row."""
        values, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(self.data.shape[1] // size * values)
