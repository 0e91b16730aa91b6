"""Messages between the server and a text process: a length, flags and bytes, over a pipe."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO

HEADER = struct.Struct("<QBB")


@dataclass(frozen=True, slots=True)
class Frame:
    """`fault` says that the payload is an error message; `last` that the sender ends after this one."""

    payload: bytes
    fault: bool = False
    last: bool = False


def write_frame(pipe: IO[bytes], frame: Frame) -> None:
    pipe.write(HEADER.pack(len(frame.payload), frame.fault, frame.last))
    pipe.write(frame.payload)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Frame | None:
    """None where the other end is closed, or was in the middle of a frame."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, fault, last = HEADER.unpack(header)
    payload = pipe.read(size)
    return Frame(payload, bool(fault), bool(last)) if len(payload) == size else None
