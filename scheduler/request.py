"""Request: one generation as the engine keeps it."""

from __future__ import annotations

from bisect import insort
from enum import Enum, auto

from cache.hashing import encode_tokens
from cache.identity import BlockHash
from cache.node import PrefixNode
from cache.reason import MissReason
from scheduler.block_table import BlockTable
from scheduler.ledger import PromptLedger
from scheduler.messages import CacheReport, FinishReason, GenerationRequest, PromptUsage, RequestTimes, TokenLogprobs


class RequestStatus(Enum):
    WAITING = auto()  # holds no block; also after a preemption
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """The state of one generation. Only the scheduler changes it.

    tokens   t0 .............. t15 | t16 .............. t31 | t32 ... t37       prompt and output so far
    table    Block                 | None: a gap            | Block             one entry per block of `tokens`
    chain    PrefixNode            | PrefixNode             | (not full: no node)
    open     [                       1,                       2]                blocks that may not be full yet

    `chain` is as long as nodes are known; a detached request's ends where its nodes stopped being true.
    """

    def __init__(
        self, message: GenerationRequest, identity: BlockHash, arrival: float, order: int, adapter: object = None
    ) -> None:
        self.request_id = message.request_id
        self.params = message.params
        self.identity = identity
        self.adapter = adapter  # what the network needs of it; opaque here
        self.guide: object = None  # what keeps its text within a grammar; opaque as well
        self.history: object = None  # what the sampler keeps of it; opaque here
        self.first: Request | None = None  # the first choice of the same prompt, where this is another one
        self.cache = message.cache
        self.reveals = bool(message.cache_salt)  # a cached token it hears of is its own salt's
        self.rank = (message.priority, order)  # lower is served first, preempted last
        self.status = RequestStatus.WAITING
        self.prompt_len = len(message.prompt_token_ids)
        self.tokens: list[int] = list(message.prompt_token_ids)
        self.encoded = bytearray(encode_tokens(message.prompt_token_ids))
        self.hashes: list[BlockHash] = []
        self.table = BlockTable()
        self.chain: list[PrefixNode] = []
        self.open: list[int] = []
        self.held: PrefixNode | None = None  # the deepest node of the chain, or the root
        self.chain_ended = False  # the next block has no node of its own: a collision, or detached
        self.detached = False  # holds blocks of nodes that were invalidated: publishes and matches nothing more
        self.preemptions = 0

        self.ledger = PromptLedger(self.prompt_len)
        self.usage: PromptUsage | None = None  # set when the prefill first ends
        self.report: CacheReport | None = None  # of the latest admission, if one was asked for
        self.wants_report = message.report
        self.others: list[tuple[BlockHash, MissReason]] = []  # roots that might have explained a miss
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]  # nothing stands before the first token
        self.high = self.prompt_len  # positions below this were computed at least once, in the output
        self.first_written: int | None = None  # lowest position this request has computed since its admission

        self.arrival = arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, tokens={len(self.tokens)}, prompt={self.prompt_len})"

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def waits(self) -> bool:
        """Whether it waits for the prefill of its prompt's first choice, which then leaves it little to compute."""
        first = self.first
        return first is not None and first.usage is None and first.status is not RequestStatus.FINISHED

    def unscored(self, start: int, end: int) -> range:
        """Those positions of a span whose logits are wanted to score the prompt's next token, and are not had yet."""
        if self.params.prompt_logprobs is None or self.usage is not None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, self.prompt_len - 1))

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.encoded += encode_tokens((token_id,))

    def reopen(self, index: int) -> None:
        """Block `index` is no longer full."""
        if index not in self.open:
            insort(self.open, index)

    def times(self, now: float) -> RequestTimes:
        """Seconds spent in each stretch of this request's life, ended at `now`."""
        started, first, last = self.first_scheduled, self.first_token, self.last_token
        return RequestTimes(
            queued=(now if started is None else started) - self.arrival,
            prefill=None if started is None or first is None else first - started,
            decode=None if first is None or last is None else last - first,
            inference=None if started is None else now - started,
            e2e=now - self.arrival,
        )
