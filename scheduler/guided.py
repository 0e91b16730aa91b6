"""Guides: what keeps a generation's text within a grammar. llguidance compiles the grammars and computes the masks.

    server                                      engine
    SetVocabulary(vocabulary)  ------------->   Guides: one vocabulary, compiled grammars by their text
    PrepareGrammar(grammar)   -------------->       compiled on a thread, or GrammarFault: before there is a request
    GenerationRequest(grammar)  ------------>       Guide: the request's own place in its grammar

    step      schedule | masks start | the network runs ......... | masks are collected | sampler | update
    threads            | a mask per guided row of the batch ... |

A Guide is a function of the tokens generated so far and nothing else: a preemption leaves it as it is, and an abort
drops it with its request. llguidance lets go of the interpreter's lock while it compiles and computes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from scheduler.commands import CommandRefused, PrepareGrammar, SetVocabulary
from scheduler.messages import Grammar, GrammarKind
from scheduler.vocabulary import Speller, Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MASK_THREADS = 2
COMPILE_THREADS = 1  # so that what is compiled comes after the vocabulary that it was sent after
PATIENCE = 1.0
"""Seconds that a step waits for a mask after its network is done; then the mask's request fails, and only it."""
MAX_KEPT_CHARS = 2**20
"""Text of the grammars that are kept compiled; a compiled one takes about 25 bytes a character."""
MAX_FAULT_CHARS = 400

# llguidance's own limits bound a compilation by the size of its text, and a mask to some 0.2 s whatever the grammar;
# its default for the first mask of a pattern such as ((a{1000}){1000}){1000} lets that take 2 s.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)

# Given last, so that a schema's own "x-guidance" changes nothing. A run of whitespace ends: a weak model would not.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}

TokenMask = NDArray[np.int32]


class GrammarFault(Exception):
    """The grammar cannot be compiled or held to; the message names the fault."""


class Guides:
    """Compiled grammars and the threads that work on them. `prepare` and `set_vocabulary` may be called on any thread,
    the rest on the engine's."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.waited = 0.0  # seconds that steps waited for masks after their network was done, in all
        self.computed = 0.0  # seconds of computing masks, on all threads
        self.masks = 0
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._speller: Speller | None = None
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammars")
        self._workers = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="masks")

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def command(self, command: SetVocabulary | PrepareGrammar) -> Future[object]:
        """Any thread. The future's exception is a CommandRefused."""
        if isinstance(command, SetVocabulary):
            return answered(self.set_vocabulary(command.vocabulary))
        return answered(self.prepare(command.grammar))

    def set_vocabulary(self, vocabulary: Vocabulary) -> Future[None]:
        """The future raises GrammarFault for a tokenizer that cannot be read."""
        with self._lock:
            self._compiled.clear()
        return self._compilers.submit(self._set_vocabulary, vocabulary)

    def _set_vocabulary(self, vocabulary: Vocabulary) -> None:
        if not self._eos:
            raise GrammarFault("the model has no end-of-sequence token, so nothing would end with its grammar")
        try:
            speller = Speller(vocabulary, self._vocab_size, self._eos)
            self._tokenizer = LLTokenizer(TokenizerWrapper(speller), eos_token=self._eos)
        except Exception as error:  # the libraries' errors are of many types
            raise GrammarFault(f"the model's tokenizer cannot be held to a grammar: {error}") from None
        self._speller = speller

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Compile on a thread, unless that was done. The future raises GrammarFault."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._compilers.submit(self._compile, grammar)
                self._forget_oldest()
            self._compiled.move_to_end(grammar)
            return found

    def _forget_oldest(self) -> None:
        kept = sum(len(grammar.text) for grammar in self._compiled)
        while kept > MAX_KEPT_CHARS and len(self._compiled) > 1:
            oldest, _ = self._compiled.popitem(last=False)  # whoever waits for it still gets it
            kept -= len(oldest.text)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None or self._speller is None:
            raise GrammarFault("the engine has no vocabulary yet")
        matcher = LLMatcher(self._tokenizer, as_llguidance(grammar, self._speller), log_level=0, limits=LIMITS)
        raise_fault(matcher)
        self._try_out(matcher.deep_copy())
        return matcher

    def _try_out(self, matcher: LLMatcher) -> None:
        """The first two masks: a grammar that nothing matches, or one too large to be held to, shows in them."""
        bits = np.unpackbits(self._mask(matcher).view(np.uint8), bitorder="little")
        token = int(bits.argmax())
        if bits[token] and token not in self._eos:
            matcher.consume_token(token)
            self._mask(matcher)

    def _mask(self, matcher: LLMatcher) -> TokenMask:
        mask = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        raise_fault(matcher)
        return mask

    # -- steps --------------------------------------------------------------------------------------------------------

    def open(self, grammar: Grammar) -> Guide:
        """The guide of a new request."""
        return Guide(self.prepare(grammar))

    def start(self, rows: Iterable[tuple[str, Guide, Sequence[int]]]) -> PendingMasks:
        """Begin to compute masks for a step's guided rows: (request id, guide, the tokens it has not seen)."""
        works = [(name, partial(self._advance, guide, unseen)) for name, guide, unseen in rows]
        return PendingMasks(self, [(name, work, self._workers.submit(work)) for name, work in works])

    def _advance(self, guide: Guide, unseen: Sequence[int]) -> TokenMask:
        started = time.perf_counter()
        mask = self._mask(guide.advance(unseen))
        with self._lock:
            self.computed += time.perf_counter() - started
            self.masks += 1
        return mask


class Guide:
    """One request's place in its grammar. `seen` counts the generated tokens it has taken in."""

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self.seen = 0
        self._compiled = compiled
        self._matcher: LLMatcher | None = None

    def advance(self, tokens: Sequence[int]) -> LLMatcher:
        """Take in the tokens generated since the last time. Past the end of the text, where only end-of-sequence is
        allowed (a request may be told to ignore it), nothing changes any more. Raises GrammarFault."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
            raise_fault(self._matcher)
        self.seen += len(tokens)
        return self._matcher


@dataclass(slots=True)
class StepMasks:
    """What came of a step's guided rows, by request id: a mask, or why there is none: a fault of the grammar's, or
    that it was not computed in time."""

    masks: dict[str, TokenMask] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)


class PendingMasks:
    """Masks that are being computed while the network runs."""

    def __init__(self, guides: Guides, rows: list[tuple[str, Callable[[], TokenMask], Future[TokenMask]]]) -> None:
        self._guides = guides
        self._rows = rows

    def collect(self, patience: float = PATIENCE) -> StepMasks:
        """Wait for all, but not for ever: a mask that takes too long is its own request's failure. One that no thread
        has come to yet, for the others' sake, is computed here."""
        made = StepMasks()
        started = time.perf_counter()
        for name, work, future in self._rows:
            try:
                wait([future], max(0.0, started + patience - time.perf_counter()))
                if future.done():
                    made.masks[name] = future.result()
                elif future.cancel():
                    made.masks[name] = work()
                else:
                    made.late[name] = f"the grammar's next tokens were not known within {patience:g} s"
            except GrammarFault as fault:
                made.faults[name] = f"the grammar cannot be held to any further: {fault}"
        if self._rows:
            self._guides.waited += time.perf_counter() - started
        return made


def answered(work: Future[Any]) -> Future[object]:
    """The answer to a command that `work` carries out: None, or CommandRefused for a GrammarFault."""
    answer: Future[object] = Future()
    answer.set_running_or_notify_cancel()

    def settle(done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            answer.set_result(None)
        elif isinstance(error, GrammarFault):
            answer.set_exception(CommandRefused(str(error)))
        else:
            answer.set_exception(CommandRefused(f"the grammar was not compiled: {type(error).__name__} {error}"))

    work.add_done_callback(settle)
    return answer


def as_llguidance(grammar: Grammar, speller: Speller) -> str:
    """A grammar in llguidance's own spelling. Raises GrammarFault."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS))
            except ValueError as error:
                raise GrammarFault(one_line(str(error))) from None
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.CHOICE:
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        case GrammarKind.GRAMMAR:
            try:  # Lark as it is; GBNF, which llama.cpp and xgrammar take, in Lark's spelling
                return with_token_ids(str(any_to_lark(grammar.text)), speller)
            except RecursionError:
                raise GrammarFault("the grammar is nested too deep") from None
            except Exception as error:  # its own error is no one type
                raise GrammarFault(one_line(str(error))) from None
    raise GrammarFault(f"unknown kind of grammar {grammar.kind!r}")


LARK_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(<[^<>\s\[\]]+>)')
"""A string, a comment or a regex of Lark; or outside of them a token by its name, which is the group."""


def with_token_ids(lark: str, speller: Speller) -> str:
    """Lark that names tokens of text, such as `<think>` without quotes, by their ids: llguidance looks names up among
    special tokens alone."""

    def by_id(piece: re.Match[str]) -> str:
        token = speller.token_of(piece[1]) if piece[1] else None
        return piece[0] if token is None else f"<[{token}]>"

    return LARK_PIECE.sub(by_id, lark)


def raise_fault(matcher: LLMatcher) -> None:
    if matcher.is_error():
        told = one_line(matcher.get_error())
        raise GrammarFault("no text matches it" if told.startswith("NoExtension") else told)


def one_line(text: str) -> str:
    """llguidance's message without its picture of the place and without its state."""
    text = text.split("<state>")[0].split("<non-verbose/>")[0]
    text = re.sub(r"\s+", " ", text).strip().rstrip(".")
    return text if len(text) <= MAX_FAULT_CHARS else text[:MAX_FAULT_CHARS] + "..."
