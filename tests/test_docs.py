"""What the documents say that can be checked: options, metrics, links, and the place where measurements go."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from benchmarks.cases import CASES, Case, Result, Sample
from benchmarks.report import document, markers, put_between_markers, table
from cache.reason import MissReason
from server.cli import serve

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def options_table() -> str:
    """README's table of `pagekv serve`'s options, made from the command itself."""
    rows = ["| option | default | |", "|---|---|---|"]
    for option in serve.params:
        if not isinstance(option, click.Option) or not option.help:
            continue
        text, _, told = option.help.partition("[default: ")
        default = (
            told.rstrip("]") if told else f"`{option.default}`" if isinstance(option.default, str | int | float) else ""
        )
        choices = ", ".join(f"`{choice}`" for choice in getattr(option.type, "choices", ()))
        rows.append(f"| `{option.opts[0]}` | {default} | {text.strip()}{f' One of {choices}.' if choices else ''} |")
    return "\n".join(rows)


def test_readme_tells_the_options_of_the_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    written = readme.partition("<!-- options:begin -->")[2].partition("<!-- options:end -->")[0].strip()
    assert written == options_table()


def test_readme_names_the_environment_variables_rightly() -> None:
    options = [parameter for parameter in serve.params if isinstance(parameter, click.Option) and parameter.envvar]
    expected = {option.opts[0]: "PAGEKV_" + option.opts[0][2:].replace("-", "_").upper() for option in options}
    assert {option.opts[0]: option.envvar for option in options} == expected
    for name in re.findall(r"PAGEKV_[A-Z_]*[A-Z]", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert name in {*expected.values(), "PAGEKV_MODEL"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path: Path) -> None:
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_files_named_in_the_structure_exist() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:server|scheduler|cache|model|tests)/[\w/.]*)`", text)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def claims() -> dict[str, list[tuple[str, str]]]:
    """docs/recovery.md's table of tests: claim -> (file, name of a test in it)."""
    text = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    found = {}
    for claim, cell in re.findall(r"^\| ([FP]\d+) \| (.+) \|$", text, re.MULTILINE):
        files = re.findall(r"\(\.\./(tests/[\w/]+\.py)\): ([^<]+)", cell)
        found[claim] = [(file, name) for file, names in files for name in re.findall(r"`(\w+)`", names)]
    return found


def test_every_claim_of_recovery_names_tests_that_exist() -> None:
    assert list(claims()) == [*(f"F{n}" for n in range(1, 10)), *(f"P{n}" for n in range(1, 12))]
    for claim, tests in claims().items():
        assert tests, claim
        for file, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), (claim, name)


def test_recovery_lists_the_reasons() -> None:
    text = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    section = text.partition("\n## Reasons\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [str(reason) for reason in MissReason]


def results() -> dict[Case, Result]:
    return {CASES[0]: {"ttft": Sample("ms", (30.0, 10.0, 20.5)), "cached": Sample("tokens", (0.0, 0.0, 0.0))}}


def test_a_benchmark_is_told_by_its_median_and_range() -> None:
    row = table(results()).splitlines()[-1]
    assert row == "| time to first token, cold, 128 tokens | 20.5 ms | 10 to 30 | cached 0 tokens |"
    assert '"median": 20.5' in document(results(), {"seed": 0})
    assert "\n" not in document(results(), {})


def test_a_benchmark_is_written_between_the_markers_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    begin, end = markers("one")
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    put_between_markers(readme, "new", "one")
    put_between_markers(readme, "newer", "one")
    assert readme.read_text(encoding="utf-8") == f"before\n{begin}\nnewer\n{end}\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        put_between_markers(readme, "new", "two")
    readme.write_text(f"{end} {begin}", encoding="utf-8")
    with pytest.raises(ValueError, match="has no"):
        put_between_markers(readme, "new", "one")


@pytest.mark.parametrize("name", ["benchmark", "block-loss"])
def test_readme_has_the_places_for_measurements(name: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = markers(name)
    assert readme.count(begin) == readme.count(end) == 1
    assert readme.index(begin) < readme.index(end)
