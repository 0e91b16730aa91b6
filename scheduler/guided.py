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

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from scheduler.commands import CommandRefused, EngineBusy, PrepareGrammar, SetVocabulary
from scheduler.compiled import CompiledGrammars
from scheduler.grammars import GrammarFault, as_llguidance, raise_fault
from scheduler.machine import allocated_memory
from scheduler.masks import PATIENCE, MaskWork, PendingMasks, TokenMask
from scheduler.messages import Grammar
from scheduler.vocabulary import Speller, Vocabulary

MASK_THREADS = 2
COMPILE_THREADS = 1  # so that what is compiled comes after the vocabulary that it was sent after
MAX_KEPT = 128  # compiled grammars that are kept for the next request that names them
MAX_KEPT_BYTES = 32 * 2**20
MAX_WORK_AHEAD = 20.0
"""Seconds of processor time that the grammars ahead of one may take; then its request is refused, as others keep the
compiler busy. The largest alone takes 2."""

# llguidance's own limits bound a compilation by the size of its text, and a mask to some 0.2 s whatever the grammar;
# its default for the first mask of a pattern such as ((a{1000}){1000}){1000} lets that take 2 s.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)


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
        self._compiled = CompiledGrammars(MAX_KEPT, MAX_KEPT_BYTES)
        self._compiling = 0.0  # processor time of compiling, in all
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammars")
        self._workers = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="masks")

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def command(self, command: SetVocabulary | PrepareGrammar) -> Future[object]:
        """Any thread. The future's exception is a CommandRefused or EngineBusy."""
        if isinstance(command, SetVocabulary):
            return answered(self.set_vocabulary(command.vocabulary))
        return answered(self.prepare(command.grammar))

    def set_vocabulary(self, vocabulary: Vocabulary) -> Future[None]:
        """The future raises GrammarFault for a tokenizer that cannot be read."""
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
        """Compile on a thread, unless that was done. The future raises GrammarFault, and EngineBusy where others keep
        that thread for too long."""
        return self._compiled.get(grammar, lambda: self._compilers.submit(self._turn, grammar, self._compiling))

    def _turn(self, grammar: Grammar, compiling: float) -> LLMatcher:
        """Compile a grammar that was handed in when `compiling` seconds had gone into others."""
        if self._compiling - compiling > MAX_WORK_AHEAD:
            self._compiled.forget(grammar)
            raise EngineBusy("other grammars are being compiled")
        before, began = allocated_memory(), time.thread_time()
        try:
            return self._compile(grammar)
        except GrammarFault as fault:
            raise fault.with_traceback(None) from None  # it is kept, and would keep what was compiled so far
        finally:
            self._compiling += time.thread_time() - began
            self._compiled.measured(grammar, allocated_memory() - before)

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
        works = [MaskWork(name, partial(self._advance, guide, unseen)) for name, guide, unseen in rows]
        return PendingMasks([(work, self._workers.submit(work)) for work in works])

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
        allowed (a request may be told to ignore it), nothing changes any more. Raises GrammarFault; EngineBusy where
        the grammar was forgotten and is still to be compiled again."""
        if self._matcher is None:
            try:
                self._matcher = self._compiled.result(PATIENCE).deep_copy()
            except TimeoutError:
                raise EngineBusy("the grammar is not compiled yet") from None
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
            raise_fault(self._matcher)
        self.seen += len(tokens)
        return self._matcher


def answered(work: Future[Any]) -> Future[object]:
    """The answer to a command that `work` carries out: None, EngineBusy, or CommandRefused for a GrammarFault."""
    answer: Future[object] = Future()
    answer.set_running_or_notify_cancel()

    def settle(done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            answer.set_result(None)
        elif isinstance(error, EngineBusy):
            answer.set_exception(error)
        elif isinstance(error, GrammarFault):
            answer.set_exception(CommandRefused(str(error)))
        else:
            answer.set_exception(CommandRefused(f"the grammar was not compiled: {type(error).__name__} {error}"))

    work.add_done_callback(settle)
    return answer
