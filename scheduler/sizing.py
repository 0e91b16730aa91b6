"""How many blocks the pool has, and how long a request may be."""

from __future__ import annotations

POOL_SHARE = 0.4
"""Of the memory that is free once the weights are loaded, when nobody says how much; the rest is for computing."""


class DoesNotFit(Exception):
    """The pool asked for, or the memory there is, cannot hold what was asked of it."""


def choose_num_blocks(num_blocks: int | None, kv_memory: int | None, free_memory: int, block_bytes: int) -> int:
    """Blocks of `block_bytes` bytes: as many as were named, else as fit into `kv_memory` or a share of free memory.

    Raises DoesNotFit if that is none, or if more is asked for than there is.
    """
    if num_blocks is None:
        memory = int(free_memory * POOL_SHARE) if kv_memory is None else kv_memory
        num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise DoesNotFit(f"one block takes {block_bytes} bytes; give the K/V cache at least that much memory")
    if num_blocks * block_bytes > free_memory:
        raise DoesNotFit(
            f"{num_blocks} blocks of {block_bytes} bytes are {num_blocks * block_bytes} bytes, "
            f"but only {free_memory} bytes are free"
        )
    return num_blocks


def choose_max_model_len(asked: int | None, model_max: int, window: int | None, pool_tokens: int) -> int:
    """Tokens that one request may have: what was asked, or the model's own limit, as far as the pool holds it.

    Raises DoesNotFit if more was asked than the model or the pool can do, or than its attention window covers: a
    sliding window is served only while it never slides.
    """
    if asked is not None and asked > model_max:
        raise DoesNotFit(f"max_model_len {asked} is more than the model's own {model_max} positions")
    if asked is not None and asked > pool_tokens:
        raise DoesNotFit(f"max_model_len {asked} is more than the {pool_tokens} tokens the K/V cache holds")
    chosen = asked or min(model_max, pool_tokens)
    if window is not None and chosen > window:
        raise DoesNotFit(
            f"the model attends to a sliding window of {window} positions, which is served only while no request "
            f"leaves it: set max_model_len to at most {window} (it is {chosen})"
        )
    return chosen
