"""Networks of quantized matrices, computed by the C backend in all forms."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from model.config import ModelConfig
from model.cpu.library import GROUP, PANEL, Library
from model.cpu.memory import Arena
from model.cpu.quantized import QuantizedPanels
from model.cpu.runner import CRunner
from model.cpu.weights import WeightForm
from model.quantized import QuantizedTensor
from model.tensors import expected_tensors
from tests.model.cpu import Built, c_dense, checkpoint, runner_of
from tests.model.cpu_checks import same_bits
from tests.model.paged import random_tokens
from tests.model.quantized_blocks import dequantized, random_quantized

ALWAYS = 1 << 30  # rows that no step has


class QuantizedNetwork:
    """Random matrices of given kinds at K-quants' sizes: `stored` as a file has them, `weights` widened by gguf."""

    def __init__(self, kinds: Mapping[str, Kind], *, tied: bool = False) -> None:
        """`kinds` are by the last part of a matrix' name, such as q_proj; "" is for all others."""
        self.config: ModelConfig = replace(
            checkpoint("wide llama3")[0], hidden_size=256, intermediate_size=512, num_layers=2, tie_embeddings=tied
        )
        self.stored: dict[str, QuantizedTensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        for seed, (name, shape) in enumerate(expected_tensors(self.config).items()):
            if len(shape) == 1:
                self.weights[name] = 1 + 0.2 * torch.randn(shape, generator=generator)
                continue
            kind = kinds.get(name.split(".")[-2], kinds[""])
            self.stored[name] = random_quantized(kind, *shape, seed=seed)
            self.weights[name] = torch.from_numpy(dequantized(self.stored[name]))

    def runner(self, built: Built, form: WeightForm, threads: int = 2) -> CRunner:
        return runner_of(self.config, self.weights, built, threads=threads, form=form, quantized=self.stored.get)


def check_forms(built: Built, network: QuantizedNetwork, rows: Sequence[int]) -> None:
    """Dense, quantized, and both with either of them read: the same logits as bytes, for steps of so many rows."""
    longest = random_tokens(random.Random(6), max(rows), network.config.vocab_size)
    runners = [network.runner(built, form) for form in (WeightForm.DENSE, WeightForm.QUANTIZED, WeightForm.BOTH)]
    for count in rows:
        tokens = longest[:count]
        found = [c_dense(network.config, runner, built.dtype, tokens) for runner in runners]
        runners[2]._library.set_quantized_rows(runners[2]._engine, ALWAYS)
        found.append(c_dense(network.config, runners[2], built.dtype, tokens))
        runners[2]._library.set_quantized_rows(runners[2]._engine, 0)
        assert found[0].isfinite().all() and found[0].std() > 0.1
        assert all(same_bits(each, found[0]) for each in found[1:])


def widened(built: Built, tensor: QuantizedTensor, vectors: int) -> NDArray[np.float32]:
    """What the library makes of a matrix' panels, `vectors` vectors of columns at a time: [rows, depth]."""
    library = ctypes.CDLL(str(built.path))
    widen = library.quantized_units
    widen.argtypes = [ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p]
    lanes = 16 if built.variant.startswith("avx512") else 8
    is_pairs = built.variant.startswith("avx512bf16")
    width, depth = vectors * lanes, tensor.depth
    panels = QuantizedPanels(Library(built.path), Arena(), [tensor])
    columns = []
    for panel, at in enumerate(panels.panel_at):
        for column in range(0, PANEL, width):
            out = np.zeros(depth * width, dtype=np.uint16 if is_pairs else np.float32)
            begin = panels.data.data_ptr() + int(at)
            widen(int(panels.kind[panel]), begin, depth // GROUP, column, vectors, out.ctypes.data)
            columns.append(_pairs(out, depth, width) if is_pairs else out.reshape(depth, width).T)
    return np.concatenate(columns)[: len(tensor.data)]


def _pairs(words: NDArray[np.uint16], depth: int, width: int) -> NDArray[np.float32]:
    bits = words.reshape(depth // 2, width, 2).transpose(1, 0, 2).reshape(width, depth)
    return np.ascontiguousarray(bits.astype(np.uint32) << 16).view(np.float32)


def check_widened(built: Built, kind: Kind) -> None:
    """Of rows that fill no panel and a depth of several K-quant blocks: gguf's values, rounded to the word's dtype."""
    tensor = random_quantized(kind, 75, 768, signed=True)
    wanted = torch.from_numpy(dequantized(tensor)).to(built.dtype).float()
    for vectors in (1, 2, 4):
        if vectors * (16 if built.variant.startswith("avx512") else 8) <= PANEL:
            assert same_bits(torch.from_numpy(np.ascontiguousarray(widened(built, tensor, vectors))), wanted)
