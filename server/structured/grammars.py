"""Asking the engine whether it can hold to a grammar, before there is a request that wants it."""

from __future__ import annotations

import asyncio

from scheduler.commands import EngineBusy, PrepareGrammar, SetVocabulary
from scheduler.messages import Grammar
from server.async_engine import AsyncEngine
from server.errors import RETRY_AFTER, BadRequest, Unavailable
from server.structured.tags import WrittenTags
from server.tokenizer import Tokenizer

PATIENCE = 120.0
"""Seconds for a compilation, others' before it included. The engine bounds the processor time of these others, which is
over long before on a machine with time to spare."""


class Grammars:
    """The engine is told the vocabulary with the first grammar: most servers never see one."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, tags: WrittenTags) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._tags = tags
        self._vocabulary = asyncio.Lock()
        self._is_told = False

    async def prepare(self, grammar: Grammar, param: str) -> Grammar:
        """The grammar, which the engine has compiled. Raises BadRequest that names `param` and the fault, and
        Unavailable where too many others are being compiled."""
        await self._tell_vocabulary()
        try:
            async with asyncio.timeout(PATIENCE):
                await self._engine.command(PrepareGrammar(grammar), type(None))
        except (TimeoutError, EngineBusy):
            message = "The server is too busy to compile the grammar now."
            raise Unavailable(message, param=param, code="grammars_busy", retry_after=RETRY_AFTER) from None
        except BadRequest as fault:
            message = f"Invalid {param!r}: {fault.message}"
            raise BadRequest(message, param=param, code="invalid_value") from None
        return grammar

    async def _tell_vocabulary(self) -> None:
        async with self._vocabulary:
            if not self._is_told:
                vocabulary = await asyncio.to_thread(self._tags.vocabulary, self._tokenizer)
                await self._engine.command(SetVocabulary(vocabulary), type(None))
                self._is_told = True
