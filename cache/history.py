"""LossHistory: what became of blocks that are no longer there, so that a miss can be explained."""

from __future__ import annotations

from collections import OrderedDict

from cache.identity import BlockHash
from cache.reason import MissReason


class LossHistory:
    """The reason of the latest loss of each of the last `capacity` blocks lost, by hash.

    A hash starts from an identity, its salt included, so nobody learns of another salt's blocks from here.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[BlockHash, MissReason] = OrderedDict()

    def note(self, hash_: BlockHash, reason: MissReason) -> None:
        self._reasons[hash_] = reason
        self._reasons.move_to_end(hash_)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def clear(self, hash_: BlockHash) -> None:
        """The block is there again."""
        self._reasons.pop(hash_, None)

    def reason(self, hash_: BlockHash) -> MissReason | None:
        return self._reasons.get(hash_)

    def __len__(self) -> int:
        return len(self._reasons)
