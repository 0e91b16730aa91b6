"""Memory for weights: aligned, apart, and in large pages where Linux gives them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from model.cpu.memory import ALIGNMENT, PIECE, Arena

SMAPS = Path("/proc/self/smaps")


def test_tensors_are_aligned_and_share_no_byte() -> None:
    arena = Arena()
    shapes = [(3, 5), (1,), (PIECE - 1000,), (7, 33), (PIECE + 1,), (2, 2), (0, 4)]
    tensors = [arena.empty(shape, torch.uint8) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tuple(tensor.shape) == shape
        assert bool((tensor == number).all())


def test_memory_lives_as_long_as_its_tensors() -> None:
    kept = Arena().empty((3, 2), torch.bfloat16).copy_(torch.arange(6).view(2, 3).T)
    Arena().empty((PIECE,), torch.uint8).fill_(255)
    assert kept.is_contiguous()
    assert kept.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells how memory was asked for")
def test_large_pages_are_asked_for() -> None:
    tensor = Arena().empty((PIECE,), torch.uint8)
    begin, flags = tensor.data_ptr(), ""
    for line in SMAPS.read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= begin < int(area[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()
