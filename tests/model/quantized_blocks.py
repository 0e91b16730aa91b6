"""Random quantized matrices, block by block as GGUF lays them out, with scales of a size that keeps networks alive."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from model.quantized import QuantizedTensor

_HALVES: dict[Kind, tuple[tuple[int, float], ...]] = {  # byte within the block, and what makes values about 1 with it
    Kind.Q4_0: ((0, 0.2),),
    Kind.Q4_1: ((0, 0.2), (2, -1.5)),
    Kind.Q5_0: ((0, 0.1),),
    Kind.Q8_0: ((0, 0.015),),
    Kind.Q4_K: ((0, 0.005), (2, 0.03)),
    Kind.Q6_K: ((208, 0.001),),
}


def random_quantized(kind: Kind, rows: int, depth: int, seed: int = 0, *, signed: bool = False) -> QuantizedTensor:
    """All bits random but the scales', which are about such that y = W x is as large as x; `signed` ones may be
    below 0."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, depth // values, size), dtype=np.uint8)
    for at, typical in _HALVES[kind]:
        halves = (typical * depth**-0.5 * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        if signed:
            halves *= rng.choice(np.array((-1, 1), dtype=np.float16), halves.shape)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return QuantizedTensor(kind, blocks.reshape(rows, -1))


def dequantized(tensor: QuantizedTensor) -> NDArray[np.float32]:
    """[rows, depth], by the `gguf` package."""
    values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.kind)
    return values
