"""Safetensors files: a single one, or those of a Hugging Face directory (one file, or shards under an index)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model.errors import BadWeights, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_ROWS = 4096


class SafetensorsWeights:
    """Which file holds which tensor; every header is read and checked on construction, no values yet.

    Where an index says which shard holds a tensor, a copy in another shard is stale and is not read.

    Raises:
        BadWeights: a file is missing, damaged, cut off or no regular file, or lacks what the index says; it is named.
        UnsupportedModel: a tensor is not of a float type (a quantized checkpoint).
    """

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        index = _read_index(path / _INDEX) if (path / _INDEX).is_file() else None
        files = sorted({path / name for name in index.values()}) if index is not None else [_single_file(path)]
        for file in files:
            self._read_header(file, index or {})
        if index is not None:
            _check_index(path, index, self._files)

    def _read_header(self, file: Path, index: dict[str, str]) -> None:
        with _opened(file) as handle:
            names: list[str] = list(handle.keys())
            for name in names:
                if index.get(name, file.name) != file.name:
                    continue
                if name in self._files:
                    raise BadWeights(f"The tensor {name} is both in {self._files[name]} and in {file}.")
                part = handle.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise UnsupportedModel(f"{file}: tensor {name} is of type {part.get_dtype()}, not a float type.")
                self._files[name] = file
                self._shapes[name] = tuple(part.get_shape())

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in pieces of some rows."""
        with _opened(self._files[name]) as handle:
            part = handle.get_slice(name)
            for start in range(0, self._shapes[name][0], _ROWS):
                yield part[start : start + _ROWS]

    def read(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file, each a view of the mapped file: copy it before it is kept."""
        for file in sorted({self._files[name] for name in names}):
            with _opened(file) as handle:
                for name in sorted(name for name in names if self._files[name] == file):
                    yield name, handle.get_tensor(name)


def _single_file(path: Path) -> Path:
    if path.is_file():
        return path
    if path.exists() and not path.is_dir():
        raise BadWeights(f"{path} is not a regular file.")
    files = sorted(path.glob("*.safetensors"))
    if path / _SINGLE in files:
        return path / _SINGLE
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise BadWeights(f"{path} has neither {_SINGLE} nor {_INDEX}, and not one other safetensors file: {found}.")
    return files[0]


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadWeights(f"{file} is not an index of safetensors shards: {error!r}") from error
    for shard in sorted(set(entries.values())):
        if Path(shard).name != shard:
            raise BadWeights(f"{file} names a shard outside its directory: {shard}")
    return entries


def _check_index(path: Path, index: dict[str, str], files: dict[str, Path]) -> None:
    wrong = sorted(name for name, shard in index.items() if files.get(name) != path / shard)
    if wrong:
        raise BadWeights(f"{path / _INDEX}: not in the shard it names: {', '.join(wrong[:8])}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.exists() and not file.is_file():  # to open a FIFO would wait for a writer for ever
        raise BadWeights(f"{file} is not a regular file.")
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except FileNotFoundError as error:
        raise BadWeights(f"{file} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{file} is not a complete safetensors file: {error}") from error
