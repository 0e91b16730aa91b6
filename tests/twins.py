"""Two byte strings that xxh3 cannot tell apart, made from its public key: what no identity may rest on."""

from __future__ import annotations

_KEY = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")  # the first 16 bytes of xxh3's default secret
_BLOCK, _STRIPE = 1024, 64


def xxh3_twins(start: int) -> tuple[bytes, bytes]:
    """Two different runs of bytes. Hashed by xxh3 behind `start` bytes, the same for both, and before at least one more
    byte, also the same, they give the same digest, of 64 or 128 bits.

    A word w of the input adds w to one sum and low32(w ^ key) * high32(w ^ key) to another. A word with the key's low
    half makes the product 0 whatever its high half is. Of two such words in the same lane only the sum counts.
    """
    words = [_KEY[:4], _KEY[8:12]]
    pad = bytes(_BLOCK - start % _BLOCK)  # short inputs are hashed in another way

    def run(first: int, second: int) -> bytes:
        stripes = [word + high.to_bytes(4, "little") for word, high in zip(words, (first, second), strict=True)]
        return pad + b"".join(stripe.ljust(_STRIPE, b"\0") for stripe in stripes) + bytes(_STRIPE)

    return run(0x3F800000, 0x3F800002), run(0x3F800001, 0x3F800001)
