"""Block: the physical unit of the cache, and the only thing that is counted, shared and evicted.

free       ref_count 0, no node
cached     ref_count 0, published: evictable
pending    ref_count >= 1, not full or not published; with a node, others may share it while it is being written
shared     ref_count >= 1, published: read-only
detached   ref_count >= 1, no node: nobody new can find it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

from cache.lineage import NO_LINEAGE, CopySource, Lineage

if TYPE_CHECKING:
    from cache.node import PrefixNode

BlockId = NewType("BlockId", int)


@dataclass(slots=True, eq=False)
class Block:
    """`block_size` token slots across all layers, one contiguous byte range of the storage.

    `written` counts the leading slots that hold valid K/V; it advances only after a step has succeeded. `node` says
    whose K/V these are: set while the block is pending under a node (`node.pending`) or published (`node.block`).
    Only a published block is ever `pinned`.

    `checksum` is taken when the block is published. `published_at` and `checked_at` are the numbers of the steps after
    which it was published and last found good; the cache's Integrity keeps these. `lineage` is what
    its first slots were copied from, `source` stands for it in the lineage of those copied from it, if there are any.
    """

    block_id: BlockId
    ref_count: int = 0
    written: int = 0
    node: PrefixNode | None = None
    pinned: bool = False
    checksum: int | None = None
    published_at: int = 0
    checked_at: int = 0
    lineage: Lineage = NO_LINEAGE
    source: CopySource | None = None

    @property
    def published(self) -> bool:
        return self.node is not None and self.node.block is self

    def copied_from(self, other: Block, step: int) -> None:
        """The first slots of this block were copied from `other` in the step of this number."""
        if other.source is None:
            other.source = CopySource(other.node)
        self.lineage = other.lineage.copied_from(other.source, step)
