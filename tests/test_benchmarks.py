"""What the benchmarks make of numbers: floors from a machine, ratios of two servers, cases by name."""

from __future__ import annotations

import click
import pytest

from benchmarks.cases import CASES, Case, Result, Sample
from benchmarks.limits import Costs, Limits, Machine, Span
from benchmarks.measure import chosen_cases
from benchmarks.peers import ratio, table
from tests.model.test_gguf import SMOLLM2


def limits() -> Limits:
    """424 GFLOP/s in bfloat16, 30 GB/s."""
    return Limits(Machine(190e9, 424e9, 30e9, 16e9), Costs.of(SMOLLM2, 2, 2), 424e9)


def test_parameters_and_bytes_of_a_known_network() -> None:
    costs = limits().costs
    assert costs.block_parameters == 106_168_320 + 2 * 576 * 30 and costs.head_parameters == 49152 * 576
    assert costs.kv_bytes == 23_040


@pytest.mark.parametrize(
    ("case", "milliseconds"),
    [("cold-128", 66), ("cold-512", 278), ("cold-2048", 1368), ("edited-2048", 1348), ("decode-1", 9.0)],
)
def test_floors_of_a_known_machine(case: str, milliseconds: float) -> None:
    """Worked out by hand: 2 operations a parameter and token, and 4 x 576 x 30 for each pair of positions."""
    assert limits().floors()[case] == pytest.approx(milliseconds, rel=0.01)


def test_a_step_is_bound_by_the_slower_of_the_two() -> None:
    one, many = [Span(96, 97)], [Span(0, 512)]
    costs = limits().costs
    assert limits().step(one) == costs.bytes_read(one) / 30e9 > costs.operations(one) / 424e9
    assert limits().step(many) == costs.operations(many) / 424e9 > costs.bytes_read(many) / 30e9


def results() -> dict[str, dict[Case, Result]]:
    ours = {CASES[0]: {"ttft": Sample("ms", (30.0, 10.0, 20.0))}, CASES[-1]: {"ttft": Sample("ms", (1.0,))}}
    return {"pagekv": ours, "other": {CASES[0]: {"ttft": Sample("ms", (80.0, 40.0, 40.0))}}}


def test_a_ratio_is_of_medians() -> None:
    assert ratio(CASES[0], "other", results()) == 0.5


def test_only_what_both_were_asked_is_compared() -> None:
    (row,) = table("other", results()).splitlines()[2:]
    assert row == f"| {CASES[0].title} | 20 ms (10 to 30) | 40 ms (40 to 80) | 0.50 |"


def test_cases_are_chosen_by_name_or_beginning() -> None:
    assert [case.name for case in chosen_cases("decode-1, warm")] == ["warm-2048", "decode-1"]
    assert [case.name for case in chosen_cases("decode")] == ["decode-1", "decode-4", "decode-8", "decode-16"]
    assert chosen_cases("") == list(CASES)
    with pytest.raises(click.BadParameter, match="no case 'cool'"):
        chosen_cases("cool")
