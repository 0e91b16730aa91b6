"""How results are told: a table for people, one JSON document for programs, and what machine they came from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.cases import Case, Result

# Instructions that decide how fast a network runs on a CPU.
TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def digits(value: float) -> str:
    """Four significant digits, and whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def hardware() -> dict[str, Any]:
    """Processor, its telling instruction sets, cores this process may use, memory, and the versions that compute."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "instructions": [flag for flag in TELLING_FLAGS if flag in present],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def describe(machine: Mapping[str, Any]) -> str:
    instructions = ", ".join(machine["instructions"]) or "no telling instruction sets"
    return (
        f"{machine['cpu']} ({instructions}), {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"torch {machine['torch']}"
    )


def table(results: Mapping[Case, Result]) -> str:
    """Markdown: one row a case, the median first, then the range it was taken from."""
    rows = ["| case | median | range | |", "|---|---:|---:|---|"]
    for case, result in results.items():
        main, *others = result.items()
        sample = main[1]
        notes = ", ".join(f"{name} {digits(other.median)} {other.unit}" for name, other in others)
        spread = f"{digits(min(sample.values))} to {digits(max(sample.values))}"
        rows.append(f"| {case.title} | {digits(sample.median)} {sample.unit} | {spread} | {notes} |")
    return "\n".join(rows)


def document(results: Mapping[Case, Result], about: Mapping[str, Any]) -> str:
    """One line of JSON: what was run and where, then per case and quantity the median, the values and their unit."""
    return json.dumps({"benchmark": "serve", **about, "results": results_json(results)})


def results_json(results: Mapping[Case, Result]) -> dict[str, Any]:
    """Per case its quantities."""
    return {case.name: samples_json(result) for case, result in results.items()}


def samples_json(result: Result) -> dict[str, Any]:
    """Per quantity its unit, median and values."""
    return {
        name: {"unit": sample.unit, "median": round(sample.median, 3), "values": [round(v, 3) for v in sample.values]}
        for name, sample in result.items()
    }


def markers(name: str) -> tuple[str, str]:
    """The two comments between which README keeps the results called `name`."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def put_between_markers(readme: Path, text: str, name: str) -> None:
    """Replaces what stands between the marker comments of `name`. Raises ValueError if they are not there."""
    first, last = markers(name)
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"{readme} has no {first} ... {last}")
    readme.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
