"""LoRA adapters: what a peft directory adds to a network's matrix products (Hu et al. 2021).

    W x   becomes   W x + scaling * B (A x),      A [rank, in_features], B [out_features, rank]

The network's q, k, v share one product, and so do gate and up; so do what an adapter adds to them:

    A = |A_q|      B = |B_q         |      stacked A, block-diagonal B; zeros where a part is not adapted
        |A_k|          |    B_k     |
        |A_v|          |         B_v|

The scaling is multiplied into B when the adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from model.config import ModelConfig
from model.digest import digest_weights
from model.errors import AdapterError, ModelError
from model.lora_config import Target, read_targets
from model.numerics import ROW_MULTIPLE
from model.safetensors_file import SafetensorsWeights
from model.tensors import Shape, expected_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

PRODUCTS: Mapping[str, Sequence[str]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""The matrix products of one layer, and the checkpoint's projections that each is made of, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one product, scaling included."""

    down: torch.Tensor  # [rank, in_features]
    up: torch.Tensor  # [out_features, rank]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, in_features], padded as for any product -> [n, out_features]."""
        return functional.linear(functional.linear(rows, self.down), self.up)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """An adapter ready for a network of one dtype and device.

    `deltas` are by the name of the network's product (model.layers.0.self_attn.qkv_proj), only where there is one.
    `digest` is over all that is computed with, the adapter's part of the CacheIdentity. `rank` is the greatest
    of any projection.
    """

    deltas: Mapping[str, LowRank]
    digest: bytes
    rank: int


def load_adapter(path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> LoraAdapter:
    """Read the peft directory `path` for a network of `config`, converted to `dtype` and put on `device`.

    Raises AdapterError: files missing or damaged, a kind of adapter that is not supported, or tensors missing,
    unexpected, of the wrong shape or not finite; they are named.
    """
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in expected_tensors(config).items()
        if name.endswith("_proj.weight")
    }
    path = _directory(path)
    targets = read_targets(path / CONFIG, list(shapes))
    tensors = _read_tensors(path, {name: shape for target in targets for name, shape in _tensors_of(target, shapes)})
    deltas: dict[str, LowRank] = {}
    for layer in range(config.num_layers):
        for product, parts in PRODUCTS.items():
            name = f"model.layers.{layer}"
            delta = _fuse([f"{name}.{part}" for part in parts], shapes, targets, tensors)
            if delta is not None:
                deltas[f"{name}.{product}"] = _convert(path, f"{name}.{product}", delta, dtype, device)
    weights = {f"{name}.{part}": getattr(delta, part) for name, delta in deltas.items() for part in ("down", "up")}
    return LoraAdapter(deltas, digest_weights(weights), max(target.rank for target in targets))


def _directory(path: Path) -> Path:
    try:
        found = path.expanduser()
        if found.is_dir():
            return found
    except (OSError, RuntimeError) as error:  # a name that is too long, a directory not to be entered, no such user
        raise AdapterError(f"{path} cannot be opened: {error}") from error
    raise AdapterError(f"There is no directory {path}.")


def _tensors_of(target: Target, shapes: Mapping[str, Shape]) -> Sequence[tuple[str, Shape]]:
    out_features, in_features = shapes[target.module]
    return (_name(target.module, "A"), (target.rank, in_features)), (
        _name(target.module, "B"),
        (out_features, target.rank),
    )


def _name(module: str, matrix: str) -> str:
    """As peft saves it: its wrapper is `base_model`, within it `model` is the checkpoint's whole network."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def _read_tensors(path: Path, expected: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Exactly the `expected` tensors, in float32 and in memory of their own."""
    file = path / WEIGHTS
    if not file.is_file():
        pickle = f" {PICKLE} is a pickle, which is never read." if (path / PICKLE).exists() else ""
        raise AdapterError(f"{path} has no {WEIGHTS}.{pickle}")
    try:
        weights = SafetensorsWeights(file)
        problems = [f"{name} is missing" for name in sorted(expected.keys() - weights.names())]
        problems += [f"{name} is unexpected" for name in sorted(weights.names() - expected.keys())]
        problems += [
            f"{name} is {list(weights.shape(name))}, expected {list(expected[name])}"
            for name in sorted(expected.keys() & weights.names())
            if weights.shape(name) != tuple(expected[name])
        ]
        if problems:
            more = f"; and {len(problems) - 16} more" if len(problems) > 16 else ""
            raise AdapterError(f"{file} does not fit the model and {CONFIG}: {'; '.join(problems[:16])}{more}.")
        return {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.read(set(expected))}
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)) from error


def _fuse(
    parts: Sequence[str], shapes: Mapping[str, Shape], targets: Sequence[Target], tensors: Mapping[str, torch.Tensor]
) -> LowRank | None:
    """What is added to the product of `parts`; None if none of them is adapted.

    The rank is filled up with zeros to whole tiles: the sums stay what they are, and the products are of the widths
    whose rows are known not to depend on their company (model/numerics.py).
    """
    adapted = {target.module: target for target in targets if target.module in parts}
    if not adapted:
        return None
    rank = sum(target.rank for target in adapted.values())
    padded = -(-rank // ROW_MULTIPLE) * ROW_MULTIPLE
    down = torch.zeros(padded, shapes[parts[0]][1])
    up = torch.zeros(sum(shapes[part][0] for part in parts), padded)
    row = column = 0
    for part in parts:
        height = shapes[part][0]
        if target := adapted.get(part):
            beyond = column + target.rank
            down[column:beyond] = tensors[_name(part, "A")]
            up[row : row + height, column:beyond] = tensors[_name(part, "B")] * target.scaling
            column = beyond
        row += height
    return LowRank(down, up)


def _convert(path: Path, name: str, delta: LowRank, dtype: torch.dtype, device: torch.device) -> LowRank:
    converted = LowRank(delta.down.to(device, dtype), delta.up.to(device, dtype))
    if not (converted.down.isfinite().all() and converted.up.isfinite().all()):
        raise AdapterError(f"{path}: what it adds to {name} is not finite in {str(dtype).removeprefix('torch.')}.")
    return converted
