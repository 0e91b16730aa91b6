"""A block table and the ids beside it."""

from __future__ import annotations

import pytest

from cache.pool import BlockPool
from scheduler.block_table import BlockTable


def ids(table: BlockTable) -> list[int]:
    table.check_integrity()
    return list(table.ids)


def test_ids_follow_the_blocks() -> None:
    blocks = BlockPool(9).blocks
    table = BlockTable()
    table.append(blocks[4])
    table.append(None)
    table.append(blocks[7])
    assert list(table) == [blocks[4], None, blocks[7]] and ids(table) == [4, 0, 7]
    table[1] = blocks[2]
    table[-1] = None
    assert list(table) == [blocks[4], blocks[2], None] and ids(table) == [4, 2, 0]
    table.clear()
    assert not table and ids(table) == []
    table.append(blocks[1])
    assert ids(table) == [1]


def test_a_table_changes_in_no_other_way() -> None:
    blocks = BlockPool(4).blocks
    table = BlockTable()
    table.append(blocks[3])
    with pytest.raises(TypeError):
        table[:] = [blocks[1]]
    for change in (
        lambda: table.extend([blocks[1]]),
        lambda: table.insert(0, blocks[1]),
        lambda: table.pop(),
        lambda: table.remove(blocks[3]),
        lambda: table.__delitem__(0),
        lambda: table.__iadd__([blocks[1]]),
    ):
        with pytest.raises(TypeError, match="grows at its end"):
            change()
    assert ids(table) == [3]
