"""The GPU benchmark in miniature: up to the device, it is known to work."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux only")


def test_it_compares_and_times_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu import run
    from benchmarks.gpu_world import SMOKE

    with torch.inference_mode():
        document = run(SMOKE, torch.device("cpu"))
    assert all(check["ok"] for check in document["attention"] + document["graphs"])
    assert [row["name"] for row in document["results"]] == [
        "attention, decode 2 x 20",
        "attention, 20 after 0",
        "decode 2 x 20",
        "decode 2 x 20, no graph",
        "prefill 20 after 0",
    ]
    assert all(row["milliseconds"] > 0 and row["floor"] > 0 for row in document["results"])
    assert "| decode 2 x 20 | triton |" in capsys.readouterr().out
