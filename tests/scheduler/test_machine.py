from __future__ import annotations

import os
import platform
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from scheduler import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 bytes available, and the files of its container's limits."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    return tmp_path


def limit(cgroup: Path, maximum: str, current: str) -> int:
    (cgroup / "memory.max").write_text(maximum)
    (cgroup / "memory.current").write_text(current)
    return machine.free_memory()


def test_without_a_container_it_is_the_machines(cgroup: Path) -> None:
    assert machine.free_memory() == 1000


@pytest.mark.parametrize(
    ("maximum", "current", "free"),
    [("max\n", "400\n", 1000), ("900\n", "400\n", 500), ("5000\n", "400\n", 1000), ("300\n", "400\n", 0)],
)
def test_a_containers_limit_counts(cgroup: Path, maximum: str, current: str, free: int) -> None:
    assert limit(cgroup, maximum, current) == free


def test_limits_nobody_understands_are_no_limits(cgroup: Path) -> None:
    assert limit(cgroup, "900", "a lot") == 1000


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert machine.usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


def test_here() -> None:
    assert machine.free_memory() > 0 and machine.usable_cores() >= 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Many small pieces, which the C library keeps when they are freed unless it is asked."""
    process = psutil.Process()
    held = [bytes(bytearray(1000)) for _ in range(200_000)]
    keep = held[-1]
    before = process.memory_info().rss
    del held
    machine.return_freed_memory()
    assert keep and process.memory_info().rss < before - 100 * 2**20
