"""Bodies that a client has compressed: gzip, deflate or zstd, decoded no further than a body may be long."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard

from server.errors import BadRequest, BodyTooLarge, UnsupportedEncoding

Decoder = Callable[[bytes, int], bytes]
MAX_WINDOW = 2**23  # bytes of memory that a zstd body may ask its decoder for; what RFC 9659 lets it

GZIP_OR_ZLIB, RAW = 47, -15  # zlib's words for the kinds of frames that it looks for


def inflate(raw: bytes, most: int) -> bytes:
    """`deflate` is zlib's format; some clients send it without zlib's frame."""
    try:
        return inflated(raw, most, GZIP_OR_ZLIB)
    except zlib.error:
        return inflated(raw, most, RAW)


def inflated(raw: bytes, most: int, frames: int) -> bytes:
    decoder = zlib.decompressobj(frames)
    made = decoder.decompress(raw, most)
    if len(made) < most and not decoder.eof:
        raise zlib.error("it is cut off")
    return made


def decode_zstd(raw: bytes, most: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    with decoder.stream_reader(raw) as reader:
        made = reader.read(most)
    if not made and raw:
        raise zstandard.ZstdError("it is cut off")
    return made


DECODERS: dict[str, Decoder] = {
    "gzip": lambda raw, most: inflated(raw, most, GZIP_OR_ZLIB),
    "x-gzip": lambda raw, most: inflated(raw, most, GZIP_OR_ZLIB),
    "deflate": inflate,
    "zstd": decode_zstd,
}


def check_encoding(encoding: str | None) -> str | None:
    """The name of the encoding; None for a body that is not compressed. Raises UnsupportedEncoding."""
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return None
    if name not in DECODERS:
        raise UnsupportedEncoding(name, tuple(DECODERS))
    return name


def decode(raw: bytes, encoding: str, limit: int) -> bytes:
    """Raises BodyTooLarge where the body would be longer than `limit` bytes, and BadRequest where it is damaged."""
    try:
        made = DECODERS[encoding](raw, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"The body is not valid {encoding}: {error}.", code="invalid_encoding") from None
    if len(made) > limit:
        raise BodyTooLarge(limit)
    return made
