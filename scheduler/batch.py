"""Batch: the spans of one step. There is no prefill and no decode, only positions whose K/V this step computes.

The span rules:

1. One request's spans in a batch are ascending and disjoint.
2. Every position before a span's `start` is written, or lies in a span or a copy of the same batch (the request's own,
   or another request's whose block it shares). Nobody ever attends to slots that were promised and not written, so a
   budget cut drops the highest positions first.
3. The last position is always computed, since its logits are needed.
4. A published block is never written. An unpublished block may have several holders; in a step, the first scheduled
   holder writes it, from `written` on. There is no standing owner: if that request leaves or is not scheduled, the
   next holder that is scheduled goes on. Only blocks whose tokens are all known are shared while pending.
5. A block is published after the step that filled it. If its node has a resident block by then, the request switches
   to that one and frees its own.
6. One row per span reaches the kernel: q_len = end - start, kv_len = end, the request's block table, causal mask
   aligned to the end.
7. Drop, invalidate and abort act between steps. A dropped block becomes None in every table that held it. A request
   that holds an invalidated or hash-colliding block is detached: it keeps its blocks and publishes nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.block import Block
from scheduler.request import Request


@dataclass(slots=True)
class Span:
    """Positions [start, end) of one request, computed in this step. Decode is a span of length 1."""

    request: Request
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `slots` slots of `source` are copied to `target` before anything is computed.

    The batch holds a reference to `source` until the step is over.
    """

    source: Block
    target: Block
    slots: int


@dataclass(slots=True)
class Batch:
    """What one step does: `copies` first, then `spans`; the requests in `sampled` get a token each.

    `planned` maps the blocks this step writes or copies into to the leading slots that will be valid after it.
    """

    spans: list[Span] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    planned: dict[Block, int] = field(default_factory=dict)
    num_tokens: int = 0

    def valid_slots(self, block: Block) -> int:
        """Leading slots of `block` that are valid once this batch has run."""
        return self.planned.get(block, block.written)

    def add(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end) of `request`; joins its previous span where they touch."""
        self.num_tokens += end - start
        if self.spans and self.spans[-1].request is request and self.spans[-1].end == start:
            self.spans[-1].end = end
        else:
            self.spans.append(Span(request, start, end))

    def add_copies(self, copies: list[Copy]) -> None:
        self.copies += copies
        self.planned.update({copy.target: copy.slots for copy in copies})

    @property
    def requests(self) -> list[Request]:
        """The requests with a span or a copy in this batch, each once, in the order they were scheduled."""
        return list(dict.fromkeys(span.request for span in self.spans))
