"""BlockTable: a request's blocks in position order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import SupportsIndex, overload

from cache.block import Block


class BlockTable(list["Block | None"]):
    """A list of blocks, None for a gap, that keeps their ids beside it, so that no step spells them out anew.

    table   Block 7 | None | Block 3
    ids     7       | 0    | 3          int32; what stands for a gap is never read: a step fills it or ends before it

    It grows at its end, entries are replaced, and all of it is given up: nothing else may change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids = array("i")

    def append(self, block: Block | None) -> None:
        super().append(block)
        self.ids.append(0 if block is None else block.block_id)

    @overload
    def __setitem__(self, index: SupportsIndex, block: Block | None) -> None: ...
    @overload
    def __setitem__(self, index: slice, block: Iterable[Block | None]) -> None: ...
    def __setitem__(self, index: object, block: object) -> None:
        if not isinstance(index, int) or not (block is None or isinstance(block, Block)):
            raise TypeError("the entries of a block table are replaced one at a time")
        super().__setitem__(index, block)
        self.ids[index] = 0 if block is None else block.block_id

    def clear(self) -> None:
        super().clear()
        self.ids = array("i")

    def check_integrity(self) -> None:
        assert list(self.ids) == [0 if block is None else block.block_id for block in self]

    def _refuse(self, *_: object, **__: object) -> None:
        raise TypeError("a block table grows at its end, and is given up whole")

    insert = extend = pop = remove = reverse = sort = __delitem__ = __iadd__ = _refuse  # type: ignore[assignment]
