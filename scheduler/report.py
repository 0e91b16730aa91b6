"""From a Match to a CacheReport: where the K/V of a prompt come from, block by block, and why not from the cache."""

from __future__ import annotations

from dataclasses import replace

from cache.hashing import TOKEN_BYTES
from cache.identity import BlockHash
from cache.match import BlockMatch, BlockStatus, Match
from scheduler.messages import BlockReport, CacheReport, PromptUsage


def report(match: Match, hashes: list[BlockHash], *, reveal: bool) -> CacheReport:
    """The report of what a match promises. `reveal` tells the cached token at a first difference."""
    blocks = tuple(_block(match, found, hashes, reveal) for found in match.blocks)
    size = match.block_size
    return CacheReport(
        prompt_tokens=match.num_tokens,
        valid_prefix=match.valid_prefix,
        computed=tuple(match.computed()),
        reused=size * sum(found.status is BlockStatus.REUSED for found in match.blocks),
        copied=sum(found.copy_slots for found in match.blocks),
        loaded=0,
        pending=size * sum(found.status is BlockStatus.PENDING for found in match.blocks),
        blocks=blocks,
    )


def settled(planned: CacheReport, usage: PromptUsage, computed: list[tuple[int, int]]) -> CacheReport:
    """What really happened, once the prefill has ended: the counts are those of the usage."""
    return replace(planned, computed=tuple(computed), reused=usage.reused, copied=usage.copied, pending=usage.pending)


def _block(match: Match, found: BlockMatch, hashes: list[BlockHash], reveal: bool) -> BlockReport:
    start = found.index * match.block_size
    status = "reused" if found.status is BlockStatus.REUSED else "copied" if found.copy_slots else "computed"
    return BlockReport(
        index=found.index,
        start=start,
        end=min(start + match.block_size, match.num_tokens),
        hash=hashes[found.index].hex() if found.index < len(hashes) else None,
        status=status,
        tier="device" if found.status is BlockStatus.REUSED or found.copy_slots else None,
        reason=None if found.reason is None else str(found.reason),
        first_difference=found.first_difference,
        cached_token=_cached_token(match, found) if reveal else None,
    )


def _cached_token(match: Match, found: BlockMatch) -> int | None:
    if found.sibling is None or found.first_difference is None:
        return None
    offset = (found.first_difference - found.index * match.block_size) * TOKEN_BYTES
    token = found.sibling.tokens[offset : offset + TOKEN_BYTES]
    return int.from_bytes(token, "little") if token else None
