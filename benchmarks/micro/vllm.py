"""Times of vLLM's KVCacheManager, as in ours.py, run by its own Python:  python vllm.py TOKENS BLOCK_SIZE RUNS HASH"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

# This file is called vllm: its folder must not be where `import vllm` looks first.
sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from clock import microseconds  # type: ignore[import-not-found,unused-ignore]  # noqa: E402


def make_manager(blocks: int, block_size: int, max_tokens: int) -> Any:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    # One block is never handed out: it stands for none.
    config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=max_tokens, scheduler_block_size=block_size, hash_block_size=block_size)


def main() -> None:
    tokens, block_size, runs = map(int, sys.argv[1:4])
    hash_function = get_hash_fn_by_name(sys.argv[4])
    kv_cache_utils.init_none_hash(hash_function)
    hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)
    rng = random.Random(0)
    prompt = [rng.randrange(49152) for _ in range(tokens)]
    blocks = tokens // block_size
    manager = make_manager(blocks, block_size, 2 * tokens)
    gc.disable()

    def request(name: str, block_hasher: Any = hasher) -> Any:
        return Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=block_hasher)

    def hash_and_match() -> object:
        fresh.block_hashes = []
        fresh.block_hashes = hasher(fresh)
        return manager.get_computed_blocks(fresh)

    def hash_all() -> object:
        bare.block_hashes = []
        return hasher(bare)

    fresh, bare = request("fresh"), request("bare", None)
    times = {
        "hash": microseconds(hash_all, runs),
        "match, nothing cached": microseconds(lambda: manager.get_computed_blocks(fresh), runs),
    }
    published, evicted = [], []
    for run in range(runs):
        one = request(f"{run}")
        # Allocating without publishing, then what a step that filled the blocks does.
        evicted.append(microseconds(lambda one=one: manager.allocate_slots(one, tokens, delay_cache_blocks=True), 1))
        published.append(microseconds(lambda one=one: manager.cache_blocks(one, tokens), 1))
        manager.free(one)
    times |= {"publish": min(published), "evict and allocate": min(evicted[1:])}
    _, found, _ = manager.get_computed_blocks(fresh)
    if found != tokens - block_size:
        raise SystemExit(f"{found} tokens were found in the cache")
    times["match, all cached"] = microseconds(lambda: manager.get_computed_blocks(fresh), runs)
    times["hash and match, all cached"] = microseconds(hash_and_match, runs)
    print(json.dumps({name: value / blocks for name, value in times.items()}))


if __name__ == "__main__":
    main()
