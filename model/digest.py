"""A digest of everything a network computes with: the bytes of its weights and its configuration.

It names weights to the cache, so nobody may be able to make two that are equal: it is blake2b (RFC 7693), which nobody
can collide, unlike xxh3, whose key is public. Blake2b reads about 0.6 GB/s on one core, so large tensors are cut into
chunks, which threads hash while the next tensors are read:

    tensor    blake2b of name, kind, shape, chunk size and the digests of its chunks
    weights   blake2b of the digests of its tensors, in order of name
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from model.config import ModelConfig

DIGEST_BYTES = 32
CHUNK_BYTES = 4 * 2**20
MOST_THREADS = 8
MOST_BYTES_BEHIND = 512 * 2**20
"""How many bytes may wait for the hashing threads before reading waits for them: they are kept in memory."""


class WeightsDigest:
    """Digests tensors on threads of its own while the caller reads the next ones. Made by `digesting`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._tensors: dict[str, tuple[list[bytes], list[Future[bytes]]]] = {}
        self._behind: deque[tuple[Future[bytes], int]] = deque()
        self._bytes_behind = 0

    def add(self, name: str, kind: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Digest a tensor's bytes, which nobody may change from now on. `kind` says how they encode its values."""
        header = [name.encode(), kind.encode(), repr(shape).encode(), str(CHUNK_BYTES).encode()]
        chunks = []
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            chunks.append(self._pool.submit(_digest_chunk, chunk))
            self._behind.append((chunks[-1], len(chunk)))
            self._bytes_behind += len(chunk)
        self._tensors[name] = header, chunks
        self._catch_up(MOST_BYTES_BEHIND)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Digest a tensor as it is in memory."""
        self.add(name, str(tensor.dtype), tuple(tensor.shape), _bytes_of(tensor))

    def _catch_up(self, most: int) -> None:
        while self._bytes_behind > most:
            future, size = self._behind.popleft()
            future.result()
            self._bytes_behind -= size

    def result(self, *parts: bytes) -> bytes:
        """`DIGEST_BYTES` bytes over `parts` and all tensors, which may have been added in any order."""
        whole = [*parts]
        for name in sorted(self._tensors):
            header, chunks = self._tensors[name]
            whole.append(_digest_parts([*header, *(chunk.result() for chunk in chunks)]))
        return _digest_parts(whole)


@contextmanager
def digesting() -> Iterator[WeightsDigest]:
    """A WeightsDigest; its threads end with the block."""
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        try:
            yield WeightsDigest(pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def digest_model(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> bytes:
    """The digest of every config value and of every tensor: name, dtype, shape, bytes."""
    with digesting() as digest:
        for name, tensor in weights.items():
            digest.add_tensor(name, tensor)
        return digest.result(*config_parts(config))


def digest_weights(weights: Mapping[str, torch.Tensor]) -> bytes:
    """The digest of every tensor, as in `digest_model`."""
    with digesting() as digest:
        for name, tensor in weights.items():
            digest.add_tensor(name, tensor)
        return digest.result()


def config_parts(config: Any) -> list[bytes]:
    """The name, type and exact value of every field, nested dataclasses included."""
    return [part for name, value in _config_values("", config) for part in (name.encode(), value)]


def _config_values(prefix: str, config: Any) -> list[tuple[str, bytes]]:
    values: list[tuple[str, bytes]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            values += _config_values(f"{prefix}{field.name}.", value)
        else:
            values.append((prefix + field.name, f"{type(value).__name__} {value!r}".encode()))
    return values


def _digest_chunk(chunk: memoryview) -> bytes:
    return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest()


def _digest_parts(parts: list[bytes]) -> bytes:
    """Each part is preceded by its length, so that no two lists spell the same bytes."""
    state = hashlib.blake2b(len(parts).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    data: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return data.data
