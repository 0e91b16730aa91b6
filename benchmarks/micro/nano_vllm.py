"""Times of nano-vllm's block manager, as in ours.py:  python nano_vllm.py TOKENS BLOCK_SIZE RUNS CLONE

nano-vllm is run from a clone of its repository; its package imports GPU kernels, its block manager does not need them.
Its manager hashes whenever it looks up: there is no match without.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clock import microseconds  # type: ignore[import-not-found,unused-ignore]


def load(clone: str) -> tuple[Any, Any]:
    """Its BlockManager and Sequence, past the package's own __init__."""
    package = ModuleType("nanovllm")
    package.__path__ = [str(Path(clone) / "nanovllm")]
    sys.modules["nanovllm"] = package
    from nanovllm.engine.block_manager import BlockManager  # type: ignore[import-not-found,unused-ignore]
    from nanovllm.engine.sequence import Sequence  # type: ignore[import-not-found,unused-ignore]

    return BlockManager, Sequence


def main() -> None:
    tokens, block_size, runs = map(int, sys.argv[1:4])
    manager_type, sequence_type = load(sys.argv[4])
    sequence_type.block_size = block_size
    rng = random.Random(0)
    prompt = [rng.randrange(49152) for _ in range(tokens)]
    blocks = tokens // block_size
    manager = manager_type(blocks, block_size)
    gc.disable()

    def hash_all() -> None:
        sequence, parent = sequence_type(prompt), -1
        for index in range(blocks):
            parent = manager.compute_hash(sequence.block(index), parent)

    def publish(sequence: Any) -> None:
        sequence.num_cached_tokens, sequence.num_scheduled_tokens = 0, tokens
        manager.hash_blocks(sequence)

    times = {"hash": microseconds(hash_all, runs)}
    published, evicted = [], []
    for _ in range(runs):
        sequence = sequence_type(prompt)
        evicted.append(microseconds(lambda sequence=sequence: manager.allocate(sequence, 0), 1))
        published.append(microseconds(lambda sequence=sequence: publish(sequence), 1))
        manager.deallocate(sequence)
    # The first one found an empty pool.
    times |= {"publish": min(published), "evict and allocate": min(evicted[1:])}
    sequence = sequence_type(prompt)
    times["hash and match, all cached"] = microseconds(lambda: manager.can_allocate(sequence), runs)
    print(json.dumps({name: value / blocks for name, value in times.items()}))


if __name__ == "__main__":
    main()
