"""Lineage: what the first slots of a block were copied from, however long ago and through however many copies.

    block of A   published, evicted            A is a source of B and of C, also when A's and B's blocks are gone:
      └─ copied to B   published, dropped      should A prove untrue, B and C are, and what was computed upon them.
           └─ copied to C

A copy and all its sources are children of one parent, which the tree keeps as long as it keeps the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.node import PrefixNode

MOST_SOURCES = 64


@dataclass(slots=True, eq=False)
class CopySource:
    """The content of one block that was copied from. `node` is the one it was published under, None until then."""

    node: PrefixNode | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """All sources of a block, each with the number of the latest step that copied from it.

    Only the newest `MOST_SOURCES` are kept, so that memory is bounded. A lineage that was cut may have had any source:
    `cut` is then the latest step that copied from one no longer known.
    """

    sources: Mapping[CopySource, int] = field(default_factory=dict)
    cut: int | None = None

    def __bool__(self) -> bool:
        return bool(self.sources)

    def copied_from(self, source: CopySource, step: int) -> Lineage:
        """The lineage of a block whose slots are copied, in this step, from `source`, which has this lineage."""
        return self.joined(Lineage({source: step}))

    def joined(self, other: Lineage) -> Lineage:
        """Everything in either."""
        if not other.sources:
            return self
        if not self.sources:
            return other
        newest: dict[object, tuple[CopySource, int]] = {}
        for source, step in (*self.sources.items(), *other.sources.items()):
            key = source if source.node is None else (source.node.tokens, source.node.parent)
            if key not in newest or newest[key][1] <= step:
                newest[key] = source, step
        return _bounded(newest.values(), [step for step in (self.cut, other.cut) if step is not None])

    def step_from(self, node: PrefixNode) -> int | None:
        """The latest step that copied from the K/V of `node`, or of an earlier one of the same tokens below the same
        parent; None if none did."""
        nodes = [(known.node, step) for known, step in self.sources.items() if known.node is not None]
        siblings = [(known, step) for known, step in nodes if known.parent is node.parent]
        steps = [step for known, step in siblings if known.tokens == node.tokens]
        if self.cut is not None and siblings:
            steps.append(self.cut)
        return max(steps, default=None)

    def matching(self, wanted: Callable[[PrefixNode], bool]) -> list[PrefixNode]:
        """The sources that are `wanted`; if the lineage was cut and knows none of them, one that it still knows."""
        nodes = [source.node for source in self.sources if source.node is not None]
        found = [node for node in nodes if wanted(node)]
        return nodes[:1] if self.cut is not None and not found else found


def _bounded(sources: Iterable[tuple[CopySource, int]], cuts: list[int]) -> Lineage:
    ordered = sorted(sources, key=lambda item: -item[1])
    cuts += [step for _, step in ordered[MOST_SOURCES:]]
    return Lineage(dict(ordered[:MOST_SOURCES]), max(cuts, default=None))


NO_LINEAGE = Lineage()
