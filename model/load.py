"""Loading a model: configuration and weights from a source, checked tensor by tensor, with a digest of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from model.config import ModelConfig
from model.digest import digest_model
from model.errors import BadWeights
from model.gguf_config import ROPE_FREQS, config_from_gguf, restore_rows, tensor_names
from model.gguf_file import GgufFile
from model.hf_config import config_from_hf
from model.quantized import QuantizedTensor
from model.safetensors_file import SafetensorsWeights
from model.source import ModelSource, SourceKind
from model.tensors import Shape, expected_tensors


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights` are by Hugging Face name, exactly those of `expected_tensors(config)`, each in memory of its own.

    `quantized` gives the same matrices as the file has them, None where it has single values; read when it is asked, so
    the file must be there still. `digest` is 16 bytes, the weights' and configuration's part of the CacheIdentity.
    """

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    digest: bytes
    source: ModelSource
    quantized: Callable[[str], QuantizedTensor | None]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose configuration is known and whose tensors are all there, but not read yet; to be loaded once.

    `in_file` says that the tensors may be views of the file.
    """

    config: ModelConfig
    source: ModelSource
    tensors: Iterator[tuple[str, torch.Tensor]]
    quantized: Callable[[str], QuantizedTensor | None]
    in_file: bool

    def load(self, *, dtype: torch.dtype, device: torch.device, progress: bool = True) -> LoadedModel:
        """Convert each tensor to `dtype` and put it on `device`; one tensor at a time, to spare memory.

        Raises BadWeights: a damaged file.
        """
        config, source = self.config, self.source
        count = len(expected_tensors(config))
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in _with_progress(self.tensors, count, source.name if progress else None):
            # A copy even where nothing is converted: a view of the file would change, or crash, along with the file.
            weights[name] = tensor.to(dtype=dtype, device=device, copy=self.in_file).contiguous()
        return LoadedModel(config, weights, digest_model(config, weights), source, self.quantized)


def open_model(source: ModelSource) -> OpenedModel:
    """Read the configuration and the list of tensors.

    Raises:
        UnsupportedModel: serving it would compute something else than it was made for.
        BadWeights: damaged or incomplete files, or tensors missing, unexpected or of the wrong shape; all are named.
    """
    return (_open_gguf if source.kind is SourceKind.GGUF else _open_hf)(source)


def load_model(source: ModelSource, *, dtype: torch.dtype, device: torch.device, progress: bool = True) -> LoadedModel:
    """`open_model` and `load` in one. Raises what they raise."""
    return open_model(source).load(dtype=dtype, device=device, progress=progress)


def _with_progress(
    tensors: Iterable[tuple[str, torch.Tensor]], count: int, label: str | None
) -> Iterable[tuple[str, torch.Tensor]]:
    if label is None:
        return tensors
    bar: Iterable[tuple[str, torch.Tensor]]
    bar = tqdm(tensors, total=count, desc=f"Loading {label}", unit="tensor", dynamic_ncols=True)
    return bar


def _open_hf(source: ModelSource) -> OpenedModel:
    config = config_from_hf(source.path)
    files = SafetensorsWeights(source.path)
    expected = expected_tensors(config)
    ignored = {name for name in files.names() if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")  # a second copy of the embedding that some checkpoints keep
    found = {name: files.shape(name) for name in files.names() - ignored}
    _check(source, expected, found)
    return OpenedModel(config, source, files.read(set(expected)), lambda name: None, in_file=True)


def _open_gguf(source: ModelSource) -> OpenedModel:
    file = GgufFile(source.path)
    config = config_from_gguf(file)
    expected = expected_tensors(config)
    names = tensor_names(config, expected)
    canonical = {gguf_name: name for name, gguf_name in names.items()}
    # What the network does not read keeps its own name, so that the error shows what the file calls it.
    found = {canonical.get(name, name): file.shape(name) for name in file.tensors if name != ROPE_FREQS}
    _check(source, expected, found)
    tensors = ((name, restore_rows(name, file.tensor(names[name]), config)) for name in expected)
    return OpenedModel(config, source, tensors, lambda name: _quantized(file, name, names[name], config), in_file=False)


def _quantized(file: GgufFile, name: str, gguf_name: str, config: ModelConfig) -> QuantizedTensor | None:
    tensor = file.quantized(gguf_name)
    if tensor is None:
        return None
    rows = restore_rows(name, torch.from_numpy(tensor.data), config)  # a row is quantized by itself
    return QuantizedTensor(tensor.kind, rows.contiguous().numpy())


def _check(source: ModelSource, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing tensors: {_listed(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected tensors: {_listed(unexpected)}")
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        problems.append(f"wrong shapes: {_listed(wrong)}")
    if problems:
        raise BadWeights(f"{source.path} does not fit its configuration. " + "; ".join(problems))


def _listed(items: list[str]) -> str:
    shown = 16
    return ", ".join(items[:shown]) + (f" and {len(items) - shown} more" if len(items) > shown else "")
