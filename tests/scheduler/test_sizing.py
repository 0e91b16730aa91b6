from __future__ import annotations

import pytest

from scheduler.sizing import POOL_SHARE, DoesNotFit, choose_max_model_len, choose_num_blocks


def test_blocks_by_number_by_memory_and_by_share() -> None:
    assert choose_num_blocks(7, 10_000, 100_000, 10) == 7
    assert choose_num_blocks(None, 10_005, 100_000, 10) == 1000
    assert choose_num_blocks(None, None, 100_000, 10) == int(100_000 * POOL_SHARE) // 10


@pytest.mark.parametrize(
    ("num_blocks", "kv_memory", "free"), [(0, None, 1000), (-1, None, 1000), (None, 9, 1000), (None, None, 9)]
)
def test_a_pool_without_a_block_does_not_fit(num_blocks: int | None, kv_memory: int | None, free: int) -> None:
    with pytest.raises(DoesNotFit, match="one block takes 10 bytes"):
        choose_num_blocks(num_blocks, kv_memory, free, 10)


@pytest.mark.parametrize(("num_blocks", "kv_memory"), [(101, None), (None, 1010)])
def test_more_than_there_is_does_not_fit(num_blocks: int | None, kv_memory: int | None) -> None:
    assert choose_num_blocks(100, None, 1000, 10) == 100
    with pytest.raises(DoesNotFit, match="101 blocks of 10 bytes are 1010 bytes, but only 1000 bytes are free"):
        choose_num_blocks(num_blocks, kv_memory, 1000, 10)


@pytest.mark.parametrize(
    ("asked", "model", "window", "pool", "chosen"),
    [
        (None, 2048, None, 10_000, 2048),
        (None, 2048, None, 1000, 1000),
        (500, 2048, None, 1000, 500),
        (1000, 2048, None, 1000, 1000),
        (2048, 2048, None, 4000, 2048),
        (500, 2048, 500, 1000, 500),
        (None, 2048, 4096, 3000, 2048),
    ],
)
def test_how_long_a_request_may_be(asked: int | None, model: int, window: int | None, pool: int, chosen: int) -> None:
    assert choose_max_model_len(asked, model, window, pool) == chosen


@pytest.mark.parametrize(
    ("asked", "model", "window", "pool", "message"),
    [
        (2049, 2048, None, 9999, "max_model_len 2049 is more than the model's own 2048 positions"),
        (1001, 2048, None, 1000, "max_model_len 1001 is more than the 1000 tokens the K/V cache holds"),
        (501, 2048, 500, 1000, "sliding window of 500 positions.*at most 500 .it is 501"),
        (None, 2048, 500, 1000, "at most 500 .it is 1000"),
    ],
)
def test_longer_than_anything_can_do(
    asked: int | None, model: int, window: int | None, pool: int, message: str
) -> None:
    with pytest.raises(DoesNotFit, match=message):
        choose_max_model_len(asked, model, window, pool)
