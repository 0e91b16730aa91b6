"""What crosses between the server and the engine: plain, picklable data and nothing else.

    server                                     engine
    GenerationRequest, Abort   ------------>   (its own thread, later perhaps its own process)
                               <------------   StepOutput (RequestOutput..., EngineStats)

Every accepted request gets exactly one `RequestOutput` with a `finish_reason`; that is its terminal event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.sampling_defaults import SamplingDefaults


class FinishReason(StrEnum):
    """Why a request ended. `stop` and `length` are OpenAI's words, the others are ours."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens or max_model_len was reached
    ABORT = "abort"  # the client left, or the server found a stop string and needs no more
    ERROR = "error"  # the step failed, or the request could never have run; `error` says why


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the server; the engine trusts it.

    `top_k` 0 means every token. `logprobs` is the number of alternatives wanted besides the chosen token
    (0 gives the chosen token's alone, None gives nothing). `seed` is always a number here: the server draws one
    when the client gave none, so that a preempted request continues with the noise it began with.

    Token ids lie in the vocabulary. `logit_bias` names each token once; it is added before penalties and temperature.
    `bad_words` are token sequences, none empty: the last token of one may not be chosen where the output ends with the
    rest. A request that leaves itself no token to choose ends in an error that is `unmeetable`.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # likewise for each token of the prompt; such a request reads no cache
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    choice: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()

    def named_tokens(self) -> Iterator[tuple[str, int]]:
        """Every token id that a field names, with the field's name."""
        yield from (("stop_token_ids", token) for token in self.stop_token_ids)
        yield from (("logit_bias", token) for token, _ in self.logit_bias)
        yield from (("allowed_token_ids", token) for token in self.allowed_token_ids or ())
        yield from (("bad_words", token) for word in self.bad_words for token in word)


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """Keep the blocks that hold a prompt's first `tokens` tokens from eviction, for `seconds` after each request that
    asks for it. Then they are cached like others."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What one request may do with the cache, and how long what it uses should stay.

    Pins are bounded by the pool's share for them. `pin` is for all that the request uses, `prefix_pins` for the
    beginning of its prompt.
    """

    read: bool = True  # use cached K/V
    write: bool = True  # leave K/V for others
    ttl: float | None = None  # seconds after the last use; None: until evicted
    pin: bool = False  # keep from eviction, for as long as `ttl` says
    prefix_pins: tuple[PrefixPin, ...] = ()

    def pinned_for(self, position: int) -> float:
        """Seconds for which a block that begins at `position` is kept from eviction; 0.0 for not at all."""
        always = (math.inf if self.ttl is None else self.ttl) if self.pin else 0.0
        return max(always, *(pin.seconds for pin in self.prefix_pins if pin.tokens > position), 0.0)


class GrammarKind(StrEnum):
    """What a Grammar's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # the whole text matches it
    CHOICE = "choice"  # a JSON list of strings; the text is one of them
    GRAMMAR = "grammar"  # in Lark's spelling or GBNF


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a generation must match, from its first token on."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. Lower `priority` is served first (vLLM's convention), then the earlier arrival.

    Requests with different `cache_salt` or `adapter` never share K/V. `adapter` is the name of a loaded one. `after` is
    the id of an earlier request for the same prompt, another choice of it: this one waits until that one's prefill has
    ended, or it has, and then takes over what it can of its K/V.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    cache: CacheControl = CacheControl()
    report: bool = False  # the output with the first token carries a CacheReport
    after: str | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature, penalties and filters.

    `top` holds the most likely tokens as (token id, logprob), best first; the chosen token need not be among them.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Where the K/V of a request's prompt came from; fixed when its prefill first ends.

    prompt_tokens == reused + copied + pending + computed. `cached_tokens` is all that was not computed by this
    request itself.
    """

    prompt_tokens: int
    reused: int  # in resident full blocks
    copied: int  # leading slots of a sibling block
    pending: int  # in blocks that another request was computing at the same time
    computed: int

    @property
    def cached_tokens(self) -> int:
        return self.reused + self.copied + self.pending


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block of a prompt. `status` is reused, loaded, copied (its first slots; the rest is computed) or computed.

    `reason` says why it was not wholly reused, in the words of cache.reason.MissReason. `first_difference` is the
    position of the first token that the closest cached prompt has otherwise, `cached_token` that token, which is told
    only to those who may know it.
    """

    index: int
    start: int
    end: int
    hash: str | None  # hexadecimal; None for the block that is not full
    status: str
    tier: str | None = None
    reason: str | None = None
    first_difference: int | None = None
    cached_token: int | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where the K/V of a prompt come from, or would come from. Positions; `computed` are [start, end) ranges.

    prompt_tokens == reused + copied + loaded + pending + the positions in `computed`.
    """

    prompt_tokens: int
    valid_prefix: int
    computed: tuple[tuple[int, int], ...]
    reused: int
    copied: int
    loaded: int
    pending: int
    blocks: tuple[BlockReport, ...]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds, of a request that ended. `decode` is from the first to the last token. None where it never got there."""

    queued: float  # arrival to first schedule
    prefill: float | None  # first schedule to first token
    decode: float | None
    inference: float | None  # first schedule to the end
    e2e: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step gave one request: new tokens, and in the last one the reason of its end."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for, else empty
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first token, if asked for; the first is None
    usage: PromptUsage | None = None  # in the output that carries the first token
    report: CacheReport | None = None  # there too, if it was asked for
    time_to_first_token: float | None = None  # seconds since arrival, in the output that carries the first token
    inter_token: float | None = None  # seconds since this request's previous token, in the later ones
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # set when an explicit stop token (not EOS) ended it
    error: str | None = None
    unmeetable: bool = False  # with an error: what the request asks for cannot be met, and the engine is well
    busy: bool = False  # with an error: this machine had no time for the request, which may be repeated later
    times: RequestTimes | None = None  # in the terminal output
    num_generated: int = 0  # tokens sampled so far, this output's included


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they stand after a step, and counters as totals since start."""

    running: int = 0
    waiting: int = 0
    blocks_in_use: int = 0  # ref_count > 0
    blocks_cached: int = 0  # published and evictable
    blocks_total: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of requests whose prefill has ended
    prompt_tokens_reused: int = 0
    prompt_tokens_copied: int = 0
    prompt_tokens_pending: int = 0
    prompt_tokens_computed: int = 0
    recomputed_tokens: int = 0  # after a preemption, or to repair a running request
    generation_tokens: int = 0
    evicted_blocks: int = 0
    published_blocks: int = 0
    hash_collisions: int = 0
    checked_blocks: int = 0  # checksums compared
    corrupt_blocks: int = 0  # and found wrong
    pinned_blocks: int = 0
    steps: int = 0
    failed_steps: int = 0
    step_tokens: int = 0  # positions computed in this step


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: tuple[RequestOutput, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the server must know of the engine it talks to."""

    model_path: str  # a .gguf file or a Hugging Face directory; the tokenizer is read from it
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together that one request may have
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens
    num_blocks: int
    dtype: str  # of weights and compute
    kv_dtype: str
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    recovery: str
    partial_reuse: bool
    device: str
    backend: str = "torch"  # or c
    sampling: SamplingDefaults = SamplingDefaults()  # of requests that do not say
    model_name: str = ""  # what clients call it unless the operator says otherwise; empty: the last part of model_path
