"""Adapters: which LoRA weights each name stands for now.

A name is a label on a version, and a version is the digest of all that the adapter computes with:

    name    "sql"  ──────────>  version 8f3a..   new requests
                      ╲
                       (was)    version 51c0..   requests that came before the reload: they keep the object they were
                                                 admitted with, and the root of the cache that goes with it

The version is a part of the CacheIdentity, so a reload with other content finds nothing cached, and one with the same
content finds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler.commands import AdapterInfo, CommandRefused


class Weights(Protocol):
    """What the network applies; opaque here but for these."""

    @property
    def digest(self) -> bytes: ...

    @property
    def rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version under its name. `path` is where it was last loaded from."""

    name: str
    path: str
    weights: Weights

    @property
    def version(self) -> bytes:
        return self.weights.digest

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.path, self.weights.rank, self.version.hex())


class Adapters:
    """The adapters that new requests may name. `read` loads a directory; what it raises, `load` raises."""

    def __init__(self, read: Callable[[str], Weights]) -> None:
        self._read = read
        self._by_name: dict[str, Adapter] = {}

    def load(self, name: str, path: str) -> Adapter:
        """Put what lies at `path` under `name`, in place of what was there. Nothing changes if it cannot be read.

        Content that is already there keeps its object, so that requests from before and after share products.
        """
        if not name:
            raise CommandRefused("an adapter needs a name", "lora_name")
        weights = self._read(path)
        known = (adapter.weights for adapter in self if adapter.version == weights.digest)
        adapter = self._by_name[name] = Adapter(name, path, next(known, weights))
        return adapter

    def unload(self, name: str) -> Adapter:
        """Forget a name. Raises CommandRefused if it is not loaded."""
        return self._by_name.pop(self.get(name, "lora_name").name)

    def get(self, name: str, param: str = "adapter") -> Adapter:
        """What `name` stands for now. Raises CommandRefused, about `param`, if it is not loaded."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise CommandRefused(f"there is no adapter {name!r}", param)
        return adapter

    def __iter__(self) -> Iterator[Adapter]:
        """In the order in which their names were first loaded."""
        return iter(self._by_name.values())
