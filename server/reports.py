"""A CacheReport as it is sent: what of a prompt was, or would be, reused, copied and computed, block by block."""

from __future__ import annotations

from typing import Any

from scheduler.messages import BlockReport, CacheReport


def report_json(report: CacheReport) -> dict[str, Any]:
    return {
        "prompt_tokens": report.prompt_tokens,
        "valid_prefix": report.valid_prefix,
        "computed": [list(span) for span in report.computed],
        "reused": report.reused,
        "copied": report.copied,
        "loaded": report.loaded,
        "pending": report.pending,
        "blocks": [block_json(block) for block in report.blocks],
    }


def block_json(block: BlockReport) -> dict[str, Any]:
    return {
        "index": block.index,
        "start": block.start,
        "end": block.end,
        "hash": block.hash,
        "status": block.status,
        "tier": block.tier,
        "reason": block.reason,
        "first_difference": difference_json(block),
    }


def difference_json(block: BlockReport) -> dict[str, int] | None:
    """The engine tells the cached token only to those who may know it; here it is passed on."""
    if block.first_difference is None:
        return None
    difference = {"position": block.first_difference}
    if block.cached_token is not None:
        difference["cached_token"] = block.cached_token
    return difference
