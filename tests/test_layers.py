"""The arrows between the layers, held over the syntax tree: what a file may import is decided by where it lies.

    server  ->  scheduler  ->  cache
                    |
                    +------->  model            cache and model never import each other

An import inside a function or under TYPE_CHECKING counts as well: an arrow is knowledge, not only load order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "scheduler", "cache", "model")

ARROWS = {
    "server": {"server", "scheduler"},
    "scheduler": {"scheduler", "cache"},
    "cache": {"cache"},
    "model": {"model"},
}
# Where requests and blocks become tensors, and nowhere else in the scheduler.
SCHEDULER_FILES_WITH_MODEL = {"scheduler/backend.py", "scheduler/inputs.py", "scheduler/engine.py"}
# The engine's thread and what it asks of the machine; every other file of the scheduler is part of the pure decision.
SCHEDULER_FILES_AT_WORK = SCHEDULER_FILES_WITH_MODEL | {
    "scheduler/engine_thread.py",
    "scheduler/compiled.py",
    "scheduler/guided.py",
    "scheduler/masks.py",
    "scheduler/machine.py",
}
IMPURE = {
    "asyncio",
    "datetime",
    "numpy",
    "os",
    "pathlib",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}
# The cache counts, hashes and compares; bytes are touched in these places only.
CACHE_FILES_WITH_BYTES = ("cache/storage.py", "cache/tiers/")
ARRAY_LIBRARIES = {"numpy", "torch"}
HTTP_LIBRARIES = {"fastapi", "httptools", "pydantic", "starlette", "uvicorn", "uvloop"}


def imported_modules(tree: ast.AST, path: str) -> Iterator[str]:
    """Absolute dotted names of all that a file imports; relative ones are resolved against its place."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *((node.module,) if node.module else ())))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def forbidden_imports(source: str, path: str) -> list[str]:
    """What `source`, lying at `path` (posix, from the root), imports against the arrows; one sentence each."""
    layer = PurePosixPath(path).parts[0]
    allowed = ARROWS[layer] | ({"model"} if path in SCHEDULER_FILES_WITH_MODEL else set())
    found = []
    for module in imported_modules(ast.parse(source), path):
        top = module.split(".")[0]
        if top in LAYERS and top not in allowed:
            found.append(f"{path} imports {module}: {layer} must not know {top}")
        elif top in {"tests", "benchmarks"}:
            found.append(f"{path} imports {module}: the packages do not know their tests")
        elif layer == "scheduler" and path not in SCHEDULER_FILES_AT_WORK and top in IMPURE:
            found.append(f"{path} imports {module}: the scheduling decision has no tensors, no clock and no I/O")
        elif layer == "cache" and not path.startswith(CACHE_FILES_WITH_BYTES) and top in ARRAY_LIBRARIES:
            found.append(f"{path} imports {module}: only {', '.join(CACHE_FILES_WITH_BYTES)} hold bytes")
        elif layer != "server" and top in HTTP_LIBRARIES:
            found.append(f"{path} imports {module}: only the server knows HTTP")
    return found


def source_files() -> list[str]:
    return sorted(file.relative_to(ROOT).as_posix() for layer in LAYERS for file in (ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("path", source_files())
def test_imports_follow_the_arrows(path: str) -> None:
    assert forbidden_imports((ROOT / path).read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/app.py", "import cache.pool"),
        ("server/app.py", "from model import load"),
        ("server/routes/chat.py", "def f():\n    from cache.pool import BlockPool"),
        ("scheduler/scheduler.py", "from server.app import create_app"),
        ("scheduler/scheduler.py", "from model.inputs import StepInputs"),
        ("scheduler/scheduler.py", "import time"),
        ("scheduler/batch.py", "import torch.nn as nn"),
        (
            "cache/tree.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scheduler.request import Request",
        ),
        ("cache/tree.py", "import model"),
        ("cache/pool.py", "import torch"),
        ("cache/tree.py", "from ..model import config"),
        ("model/runner.py", "from cache.storage import Storage"),
        ("model/attention/base.py", "from ...scheduler import batch"),
        ("model/runner.py", "from fastapi import FastAPI"),
        ("cache/pool.py", "from tests.worlds import make_cache"),
    ],
)
def test_an_arrow_that_points_the_wrong_way_is_found(path: str, source: str) -> None:
    assert len(forbidden_imports(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/async_engine.py", "import asyncio\nfrom scheduler.messages import StepOutput"),
        ("scheduler/scheduler.py", "from cache.pool import BlockPool\nfrom . import batch"),
        ("scheduler/inputs.py", "import torch\nfrom model.inputs import StepInputs"),
        ("scheduler/engine_thread.py", "import threading, time"),
        ("cache/storage.py", "import torch"),
        ("cache/tiers/disk.py", "import torch\nfrom ..pool import BlockPool"),
        ("model/attention/paged.py", "import torch\nfrom .base import Planes\nfrom ..inputs import StepInputs"),
    ],
)
def test_an_arrow_that_points_the_right_way_is_not(path: str, source: str) -> None:
    assert forbidden_imports(source, path) == []


def module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which of our modules each module loads when it is itself loaded (imports in functions come later)."""
    modules = {module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        tree = ast.parse(source)
        top_level = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        targets = set()
        for name in imported_modules(top_level, path):
            # `from package.module import thing` names either a module or a thing within one.
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module_name(path):
                targets.add(target)
        graph[module_name(path)] = targets
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A list of modules that import each other in a ring, or nothing."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if ring := visit(target, [*trail, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(graph) if (ring := visit(module, []))), [])


def test_modules_do_not_import_each_other_in_a_ring() -> None:
    assert find_cycle(import_graph({path: (ROOT / path).read_text(encoding="utf-8") for path in source_files()})) == []


def test_a_ring_is_found() -> None:
    sources = {
        "cache/a.py": "from cache import b",
        "cache/b.py": "import xxhash\nfrom cache.c import thing",
        "cache/c.py": "from . import a",
        "cache/d.py": "from cache.a import other",
    }
    assert find_cycle(import_graph(sources)) == ["cache.a", "cache.b", "cache.c"]
