"""Two identities that differ anywhere spell different bytes, and so do their first blocks' hashes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import BlockHasher, encode_tokens
from cache.identity import CacheIdentity
from tests.twins import xxh3_twins

BASE = CacheIdentity(b"weights", "torch.float32", "torch.float32", "numerics 1", "layout", 16)

short = st.text(st.sampled_from("ab\0"), max_size=3)  # few letters, so that neighbouring parts are often alike


@st.composite
def identities(draw: st.DrawFn) -> CacheIdentity:
    return CacheIdentity(
        model=draw(st.binary(max_size=2)),
        compute_dtype=draw(short),
        kv_dtype=draw(short),
        numerics=draw(short),
        layout=draw(short),
        block_size=draw(st.integers(0, 300)),
        adapter=draw(st.none() | st.binary(max_size=2)),
        salt=draw(st.none() | short),
    )


@given(identities(), identities())
def test_identities_are_equal_exactly_where_their_bytes_are(left: CacheIdentity, right: CacheIdentity) -> None:
    assert (left == right) == (left.encode() == right.encode())
    assert (left == right) == (left.root_hash() == right.root_hash())
    tokens = encode_tokens(range(16))
    hasher = BlockHasher()
    assert (left == right) == (hasher(left.root_hash(), tokens) == hasher(right.root_hash(), tokens))


OTHER = {
    "model": b"weightz",
    "compute_dtype": "torch.bfloat16",
    "kv_dtype": "torch.bfloat16",
    "numerics": "numerics 2",
    "layout": "layout 2",
    "block_size": 32,
    "adapter": b"",
    "salt": "",
}


def test_every_part_has_a_case() -> None:
    assert OTHER.keys() == {field.name for field in fields(CacheIdentity)}


@pytest.mark.parametrize("name", OTHER)
def test_each_part_alone_makes_another_root(name: str) -> None:
    assert replace(BASE, **{name: OTHER[name]}).root_hash() != BASE.root_hash()


def test_nothing_is_not_the_empty_string_nor_the_empty_bytes() -> None:
    spellings = [
        replace(BASE, salt=None).encode(),
        replace(BASE, salt="").encode(),
        replace(BASE, adapter=b"").encode(),
        replace(BASE, adapter=b"", salt="").encode(),
    ]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"compute_dtype": "ab", "kv_dtype": "c"}, {"compute_dtype": "a", "kv_dtype": "bc"}),
        ({"adapter": b"x"}, {"salt": "x"}),
        ({"adapter": b"xy", "salt": "z"}, {"adapter": b"x", "salt": "yz"}),
        ({"numerics": "16", "block_size": 1}, {"numerics": "1", "block_size": 61}),
        ({"salt": "16"}, {"salt": None, "block_size": 1616}),
    ],
)
def test_no_part_runs_into_the_next(left: dict[str, object], right: dict[str, object]) -> None:
    assert replace(BASE, **left).encode() != replace(BASE, **right).encode()  # type: ignore[arg-type]


def test_a_part_is_preceded_by_its_kind_and_length() -> None:
    encoded = replace(BASE, salt="xyz").encode()
    assert encoded.endswith(b"salt" + b"s" + (3).to_bytes(8, "little") + b"xyz")
    assert replace(BASE, salt=None).encode().endswith(b"salt" + b"n" + bytes(8))


def test_the_root_hash_is_stable() -> None:
    """Tiers outlive the process: what spelled a hash yesterday must spell it today."""
    assert BASE.root_hash() == replace(BASE).root_hash()
    assert BASE.root_hash().hex() == "15ee699b74d44969f6f4e5399f1a90337c456aadd7cad079c2b5fe18847748bb"


def test_identities_whose_xxh3_is_equal_have_different_roots() -> None:
    """Anybody can make them, since the key of xxh3 is public."""
    start = replace(BASE, adapter=b"").encode().rindex(b"salt") - 4  # where the adapter's bytes begin
    left, right = (replace(BASE, adapter=data) for data in xxh3_twins(start))
    assert xxhash.xxh3_128_digest(left.encode()) == xxhash.xxh3_128_digest(right.encode())
    assert left.root_hash() != right.root_hash()
