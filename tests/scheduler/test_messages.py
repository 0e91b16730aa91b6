"""What crosses between server and engine is plain, frozen, picklable data: a process of its own stays possible."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing
from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType

import pytest

from scheduler import commands, config, messages

MODULES = (messages, commands, config)
CLASSES = [
    member
    for module in MODULES
    for _, member in inspect.getmembers(module, dataclasses.is_dataclass)
    if member.__module__ == module.__name__
]


def example(kind: object) -> object:
    """Some value of an annotated type, with something in every container and no default left as it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return example(next(argument for argument in arguments if argument is not NoneType))
    if origin is tuple:
        return (example(arguments[0]),) if arguments[-1] is ... else tuple(example(argument) for argument in arguments)
    if origin in (dict, Mapping):
        return {example(arguments[0]): example(arguments[1])}
    if origin is list:
        return [example(arguments[0])]
    if origin is frozenset:
        return frozenset((example(arguments[0]),))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: example(hints[field.name]) for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    return {int: 7, float: 0.25, str: "text", bytes: b"\0\xff", bool: True, object: "any"}[kind]  # type: ignore[index]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_messages_come_out_of_a_pickle_as_they_went_in(kind: type) -> None:
    message = example(kind)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(message, protocol)) == message


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_messages_are_frozen(kind: type) -> None:
    message = example(kind)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)


def test_the_messages_are_among_those_looked_at() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert {"GenerationRequest", "RequestOutput", "StepOutput", "EngineInfo", "EngineStats", "EngineConfig"} <= names


def test_refusals_are_picklable_too() -> None:
    """An exception is made anew from its arguments: none may be missing there."""
    error = pickle.loads(pickle.dumps(commands.CommandRefused("no such adapter", "adapter")))
    assert str(error) == "no such adapter" and error.param == "adapter"
