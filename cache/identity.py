"""CacheIdentity: everything K/V depend on besides the tokens.

Two engines whose identities differ in any part must never share a block (RECOVERY F7), so every part is encoded with
its name, its kind and its length: no two identities can spell the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: xxh3-128 over the parent's BlockHash and the block's token ids. That of a root is `ROOT_BYTES` of blake2b
over its identity: tokens and parents are compared on every hit, but an identity is known by its hash alone, so nobody
may be able to make two that are equal, as anybody can for xxh3."""

ROOT_BYTES = 32


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """`model` is a digest of the weights' bytes as loaded and of every value of the configuration; `adapter` likewise,
    None where there is none, as `salt`."""

    model: bytes
    compute_dtype: str
    kv_dtype: str
    numerics: str  # the backend's name and the version of its arithmetic
    layout: str
    block_size: int
    adapter: bytes | None = None
    salt: str | None = None

    def encode(self) -> bytes:
        """Unambiguous bytes: for each part its name, kind and value, the name and value preceded by their length."""
        parts = [_encode_part(field.name, getattr(self, field.name)) for field in fields(self)]
        return b"".join(parts)

    def root_hash(self) -> BlockHash:
        """The hash that stands as parent of every first block under this identity."""
        return BlockHash(hashlib.blake2b(self.encode(), digest_size=ROOT_BYTES).digest())


def _encode_part(name: str, value: bytes | str | int | None) -> bytes:
    if value is None:
        kind, raw = b"n", b""
    elif isinstance(value, bytes):
        kind, raw = b"b", value
    elif isinstance(value, str):
        kind, raw = b"s", value.encode()
    else:
        kind, raw = b"i", str(value).encode()
    label = name.encode()
    return len(label).to_bytes(4, "little") + label + kind + len(raw).to_bytes(8, "little") + raw
