"""Bodies that a client has compressed, and those that are not what they say."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest
import zstandard

from tests.server.harness import Running, serve

BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


WAYS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "capitals": ("GZip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a frame": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "identity": ("identity", bytes),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve() as running:
        yield running


def send(server: Running, encoding: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=20)


@pytest.mark.parametrize("way", WAYS)
def test_a_compressed_body(server: Running, way: str) -> None:
    encoding, compress = WAYS[way]
    response = send(server, encoding, compress(BODY))
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "hel"


@pytest.mark.parametrize("way", ["gzip", "deflate", "deflate without a frame", "zstd"])
@pytest.mark.parametrize("size", [5_000_000, 400_000_000])
def test_a_body_that_unfolds_to_too_much(server: Running, way: str, size: int) -> None:
    """Nothing is decoded beyond the limit."""
    encoding, compress = WAYS[way]
    packed = compress(b" " * size)
    error = send(server, encoding, packed).json()["error"]
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize("way", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], lambda data: b"\0" + data, lambda data: b""])
def test_a_damaged_body(server: Running, way: str, spoil: Callable[[bytes], bytes]) -> None:
    encoding, compress = WAYS[way]
    response = send(server, encoding, spoil(compress(BODY)))
    assert response.status_code == 400 and response.json()["error"]["code"] in ("invalid_encoding", "invalid_json")


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress", "x" * 200])
def test_an_unknown_encoding_is_refused_before_the_body_is_read(server: Running, encoding: str) -> None:
    response = send(server, encoding, BODY)
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_encoding"
    assert "gzip" in response.headers["accept-encoding"]


def test_the_limit_is_on_the_compressed_body_too(server: Running) -> None:
    assert send(server, "gzip", b"\0" * 5_000_000).status_code == 413
