"""What an operator asks of a running cache, and the answers: plain, picklable data, like the messages.

A command acts between two steps. `CommandRefused` is the answer to one that makes no sense for this engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.messages import GenerationRequest, Grammar
from scheduler.vocabulary import Vocabulary


class CommandRefused(Exception):
    """The command cannot be carried out; nothing was changed. `param` names the part of it that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineBusy(Exception):
    """The command may be carried out later; now others keep the engine from it."""


class Operation(StrEnum):
    DROP = "drop"  # the bytes are gone, identity stands, descendants stay valid
    INVALIDATE = "invalidate"  # no longer true: forgotten, with all descendants


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """What to act on; exactly one of `prompt`, `block_hash`, `adapter`, `cache_salt` alone, or `everything`.

    A `prompt` comes with the adapter and salt it was sent with; `blocks` names some of its blocks, by index.
    """

    prompt: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    block_hash: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    everything: bool = False


@dataclass(frozen=True, slots=True)
class ChangeCache:
    """Drop or invalidate. Answered by a CacheEffect."""

    operation: Operation
    target: CacheTarget


@dataclass(frozen=True, slots=True)
class CacheEffect:
    """How many blocks lost their K/V, their bytes, and where those were."""

    blocks: int
    bytes: int
    by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanPrompt:
    """What would be computed if `request` came now. Answered by a CacheReport; nothing is computed or touched.

    `reveal` adds the cached token at a first difference.
    """

    request: GenerationRequest
    reveal: bool = False


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA directory under a name; under a name that is taken, other weights are a new version. Answered by
    an AdapterInfo."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget an adapter: new requests are refused, those under way finish on it. Answered by an AdapterInfo."""

    name: str


@dataclass(frozen=True, slots=True)
class ListAdapters:
    """The adapters that requests may name. Answered by a tuple of AdapterInfo."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    name: str
    path: str
    rank: int
    version: str  # hexadecimal digest of its weights and configuration


@dataclass(frozen=True, slots=True)
class SetVocabulary:
    """What the token ids stand for: grammars are held to in text, and no engine knows any by itself. Answered by None,
    beside the steps."""

    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Compile a grammar, so that a bad one is refused before there is a request, and a good one is there when its
    request comes. Answered by None, beside the steps."""

    grammar: Grammar


Command = ChangeCache | PlanPrompt | LoadAdapter | UnloadAdapter | ListAdapters | SetVocabulary | PrepareGrammar
