"""Loading a model: configuration and weights from a source, checked tensor by tensor, with a digest of the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from model.advice import advice_of_directory, advice_of_gguf
from model.config import ModelConfig
from model.digest import WeightsDigest, config_parts, digesting
from model.errors import BadWeights
from model.gguf_config import config_from_gguf, restore_rows, tensor_names
from model.gguf_file import GgufFile
from model.gguf_rope import ROPE_TENSORS
from model.hf_config import config_from_hf
from model.hf_names import EMBEDDING, HEAD, count_layers, is_computed, stored_names
from model.quantized import QuantizedTensor
from model.safetensors_file import SafetensorsWeights
from model.source import ModelSource, SourceKind
from model.tensors import Shape, expected_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights` are by Hugging Face name, exactly those of `expected_tensors(config)`, each in memory of its own.

    `quantized` gives the same matrices as the file has them, None where it has single values; read when it is asked, so
    the file must be there still. `digest` is of what is computed with: weights, their dtype, configuration.
    """

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    digest: bytes
    source: ModelSource
    quantized: Callable[[str], QuantizedTensor | None]


@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A tensor's values, in memory of their own, and the quantized bytes that the file has in their place, if any."""

    name: str
    values: torch.Tensor
    quantized: QuantizedTensor | None = None

    def add_to(self, digest: WeightsDigest) -> None:
        """What the file has is digested, which is shorter than what is made of it and says the same."""
        if self.quantized is None:
            digest.add_tensor(self.name, self.values)
        else:
            kind, data = self.quantized.kind.name, self.quantized.data
            digest.add(self.name, kind, tuple(self.values.shape), data.reshape(-1).data)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose configuration is known and whose tensors are all there, but not read yet; to be loaded once.

    `advice` is how its makers advise to sample, unchecked.
    """

    config: ModelConfig
    source: ModelSource
    tensors: Iterator[ReadTensor]
    quantized: Callable[[str], QuantizedTensor | None]
    advice: Mapping[str, object]

    def settled(self, longest: int) -> OpenedModel:
        """With rotary angles that are the same for texts of any length up to `longest` tokens."""
        return replace(self, config=replace(self.config, rope=self.config.rope.settled(longest)))

    def load(self, *, dtype: torch.dtype, device: torch.device, progress: bool = True) -> LoadedModel:
        """Convert each tensor to `dtype` and put it on `device`; one tensor at a time, to spare memory. What the file
        has of it is digested meanwhile.

        Raises BadWeights: a damaged file.
        """
        config, source = self.config, self.source
        count = len(expected_tensors(config))
        weights: dict[str, torch.Tensor] = {}
        with digesting() as digest:
            for tensor in _with_progress(self.tensors, count, source.name if progress else None):
                tensor.add_to(digest)
                weights[tensor.name] = tensor.values.to(dtype=dtype, device=device).contiguous()
            identity = digest.result(str(dtype).encode(), *config_parts(config))
        return LoadedModel(config, weights, identity, source, self.quantized)


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


def _with_progress(tensors: Iterable[ReadTensor], count: int, label: str | None) -> Iterable[ReadTensor]:
    if label is None:
        return tensors
    bar: Iterable[ReadTensor]
    bar = tqdm(tensors, total=count, desc=f"Loading {label}", unit="tensor", dynamic_ncols=True)
    return bar


def _open_hf(source: ModelSource) -> OpenedModel:
    files = SafetensorsWeights(source.path)
    config = config_from_hf(source.path, num_layers=count_layers(files.names()))
    names = stored_names(files.names(), config)
    if config.tie_embeddings and HEAD in names and not _equal(files, names[HEAD], names[EMBEDDING]):
        _log.warning(
            "%s: config.json ties the head to the embedding, but %s holds other values; the head is used, as "
            "transformers does.",
            source.path,
            names[HEAD],
        )
        config = replace(config, tie_embeddings=False)
    expected = expected_tensors(config)
    _check(source, expected, {name: files.shape(stored) for name, stored in names.items() if name in expected})
    if extra := sorted(name for name in files.names() - set(names.values()) if not is_computed(name)):
        _log.warning("%s: tensors that this model does not use: %s", source.path, _listed(extra))
    canonical = {names[name]: name for name in expected}
    # A copy even where nothing is converted: a view of the file would change, or crash, along with the file.
    tensors = (ReadTensor(canonical[name], tensor.clone()) for name, tensor in files.read(set(canonical)))
    advice = {**source.advice, **advice_of_directory(source.path)}
    return OpenedModel(config, source, tensors, lambda name: None, advice)


def _equal(files: SafetensorsWeights, first: str, second: str) -> bool:
    if files.shape(first) != files.shape(second):
        return False
    # One at a time from each file: both may be gigabytes, and are not needed any more.
    pairs = zip(files.rows(first), files.rows(second), strict=True)
    return all(torch.equal(ours.float(), theirs.float()) for ours, theirs in pairs)


def _open_gguf(source: ModelSource) -> OpenedModel:
    file = GgufFile(source.path)
    config = config_from_gguf(file)
    expected = expected_tensors(config)
    names = tensor_names(config, expected)
    canonical = {gguf_name: name for name, gguf_name in names.items()}
    # What the network does not read keeps its own name, so that the error shows what the file calls it.
    found = {canonical.get(name, name): file.shape(name) for name in file.tensors if name not in ROPE_TENSORS}
    _check(source, expected, found)
    tensors = (_read_gguf(file, name, names[name], config) for name in expected)
    advice = {**source.advice, **advice_of_gguf(file)}
    return OpenedModel(config, source, tensors, lambda name: _quantized(file, name, names[name], config), advice)


def _read_gguf(file: GgufFile, name: str, gguf_name: str, config: ModelConfig) -> ReadTensor:
    quantized = file.quantized(gguf_name)
    return ReadTensor(name, restore_rows(name, file.tensor(gguf_name, quantized), config), quantized)


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
