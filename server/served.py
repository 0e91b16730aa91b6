"""What clients may name as `model`: the base model, and each adapter over it as a model of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler.commands import AdapterInfo
from server.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    info: AdapterInfo
    created: int  # seconds since 1970


class ServedModels:
    """Names to adapters, on the event loop alone. Whoever loads or unloads one holds `changing` meanwhile.

    An adapter is taken out of here before the engine forgets it and put in after the engine has it, and a request is
    submitted in the same turn of the loop in which its name is looked up: so no request reaches the engine with an
    adapter that is not there.
    """

    def __init__(self, base: str, adapters: Iterable[AdapterInfo] = (), aliases: Iterable[str] = ()) -> None:
        """`base` is the name by which answers call the model; it answers to its `aliases` as well."""
        self.base = base
        self._bases = frozenset((base, *aliases))
        self.created = int(time.time())
        self.changing = asyncio.Lock()
        self._adapters: dict[str, ServedAdapter] = {}
        for info in adapters:
            self.add(info)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request for `model` runs on; None is the base model, which no name means as well.

        Raises UnknownModel.
        """
        if model is None or model in self._bases:
            return None
        if model not in self._adapters:
            raise UnknownModel(model, [self.base, *self._adapters])
        return model

    def is_base(self, name: str) -> bool:
        return name in self._bases

    def name_of(self, model: str | None) -> str:
        """What an answer calls the `model` that it was asked for. Raises UnknownModel."""
        return self.adapter(model) or self.base

    def get(self, name: str) -> ServedAdapter | None:
        return self._adapters.get(name)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._adapters.values())

    def add(self, info: AdapterInfo) -> None:
        self._adapters[info.name] = ServedAdapter(info, int(time.time()))

    def remove(self, name: str) -> None:
        del self._adapters[name]
