"""MissReason: why a block's K/V must be computed. The values are part of the HTTP API."""

from __future__ import annotations

from enum import StrEnum


class MissReason(StrEnum):
    NEVER_SEEN = "never_seen"  # nobody has computed it under this identity, as far as is remembered
    EVICTED = "evicted"  # it was there, and gave room to another
    DROPPED = "dropped"  # an operator gave its bytes up
    EXPIRED = "expired"  # its time to live ran out
    INVALIDATED = "invalidated"  # an operator said that something it depends on is no longer true
    CORRUPT = "corrupt"  # its bytes were found damaged, or are tainted by such bytes
    DIFFERENT_TOKEN = "different_token"  # the closest cached prompt has another token, here or in an earlier block
    AFTER_GAP = "after_gap"  # perhaps there, but recovery is `truncate` and an earlier block is missing
    LINEAGE_UNKNOWN = "lineage_unknown"  # there, but the record of an ancestor is gone
    COLLISION = "collision"  # its hash belongs to other tokens
    IN_FLIGHT = "computed_by_another_request"  # another request is computing it right now; it is shared, not computed
    LAST_POSITION = "last_position"  # it is there, but the last position's logits are needed
    OTHER_ADAPTER = "other_adapter"  # these tokens are cached under another adapter, or under none
    OTHER_MODEL_VERSION = "other_model_version"  # these tokens are cached under other weights of the same name
    TIER_FAILURE = "tier_failure"  # a slower tier had it and could not deliver it
    OPTED_OUT = "opted_out"  # the request asked not to read the cache
