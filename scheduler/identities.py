"""Identities: which root of the cache a request belongs under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cache.identity import BlockHash, CacheIdentity
from cache.reason import MissReason


@dataclass(frozen=True, slots=True)
class Root:
    """One identity that requests have come under. `adapter` is the adapter's name; its version is in the identity."""

    hash: BlockHash
    identity: CacheIdentity
    adapter: str | None


class Identities:
    """The roots seen so far; those that the cache keeps nothing under are forgotten now and then."""

    def __init__(self, base: CacheIdentity, in_use: Callable[[BlockHash], bool], most: int = 4096) -> None:
        self._base = base
        self._in_use = in_use
        self._most = most
        self._roots: dict[tuple[str | None, bytes | None, str | None], Root] = {}

    def root(self, adapter: str | None, version: bytes | None, salt: str | None) -> Root:
        """The root for requests with this adapter, in this version, and this salt."""
        key = (adapter, version, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= self._most:
                self._forget_unused()
            identity = replace(self._base, adapter=version, salt=salt)
            root = self._roots[key] = Root(identity.root_hash(), identity, adapter)
        return root

    def _forget_unused(self) -> None:
        self._roots = {key: root for key, root in self._roots.items() if self._in_use(root.hash)}
        self._most = max(self._most, 2 * len(self._roots))

    def __iter__(self) -> Iterator[Root]:
        """The roots that the cache keeps something under."""
        return iter([root for root in self._roots.values() if self._in_use(root.hash)])

    def others(self, mine: Root) -> Iterator[tuple[Root, MissReason]]:
        """Roots of the same salt under which the same tokens may be cached, and what that is called. Never those of
        another salt: a reason must not tell what its owner has cached."""
        for root in self:
            if root.hash == mine.hash or root.identity.salt != mine.identity.salt:
                continue
            same_name = root.adapter == mine.adapter
            yield root, MissReason.OTHER_MODEL_VERSION if same_name else MissReason.OTHER_ADAPTER
