"""`pagekv plan` from the shell, against a running server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from server.cli import main
from tests.server.harness import serve
from tests.server.real import RealServer, serve_real

IDS = random.Random("plan").choices(range(10, 250), k=128)


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[RealServer]:
    with serve_real(chat_model) as running:
        yield running


def plan(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--url", url, *arguments])


def rows(result: Result) -> list[list[str]]:
    """The cells of the lines that tell of a block."""
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines() if line.strip()[:1].isdigit() and ".." in line]


def test_a_lost_block_and_an_edited_token(server: RealServer) -> None:
    ids = ",".join(map(str, IDS))
    server.complete(IDS)
    server.post("/v1/cache/drop", prompt=IDS, blocks=[2])
    result = plan(server.url, "--ids", ids)
    hashes = [block["hash"][:12] for block in server.plan(IDS)["blocks"]]
    assert rows(result)[1:4] == [
        ["1", "16..31", "reused", "device", hashes[1]],
        ["2", "32..47", "computed", "dropped", hashes[2]],
        ["3", "48..63", "reused", "device", hashes[3]],
    ]
    assert "128 tokens: 96 reused, 15 copied, 0 loaded, 0 pending; valid prefix 32\n" in result.output
    assert result.output.endswith("computed: 32..47, 127\n")
    server.complete(IDS)
    edited = ",".join(map(str, [*IDS[:39], IDS[39] + 1, *IDS[40:]]))
    result = plan(server.url, "--ids", edited)
    assert rows(result)[2][:6] == ["2", "32..47", "copied", "device", "different_token", "39"]
    assert result.output.endswith("computed: 39..127\n")


def test_salt_and_the_token_cached_under_it(server: RealServer) -> None:
    server.complete(IDS, cache_salt="mine")
    edited = ",".join(map(str, [*IDS[:39], IDS[39] + 1, *IDS[40:]]))
    result = plan(server.url, "--salt", "mine", "--model", "tiny", "--ids", edited)
    assert f"39 (cached token {IDS[39]})" in result.output


def test_forms_of_a_prompt(server: RealServer, tmp_path: Path) -> None:
    text = "été: how many words are in this text? " * 3
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    expected = json.loads(plan(server.url, text, "--json").output)
    assert expected == server.plan(text)
    assert json.loads(plan(server.url, "--file", str(file), "--json").output) == expected
    messages = [{"role": "user", "content": text}]
    expected = server.post("/v1/cache/plan", messages=messages)
    for content in (messages, {"messages": messages, "temperature": 0}):
        file.write_text(json.dumps(content), encoding="utf-8")
        assert json.loads(plan(server.url, "--messages", str(file), "--json").output) == expected


def test_what_the_server_refuses(server: RealServer) -> None:
    result = plan(server.url, "--model", "gpt-9", "hello")
    assert (result.exit_code, result.output) == (
        1,
        "Error: The model 'gpt-9' does not exist. Served here: tiny. (HTTP 404)\n",
    )
    result = plan(server.url, "--salt", "", "hello")
    assert result.exit_code == 1 and "cache_salt" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Exactly one of PROMPT, --file, --messages and --ids"),
        (("x", "--ids", "1"), "Exactly one of PROMPT, --file, --messages and --ids"),
        (("--ids", "1,,2"), "not a list of integers"),
        (("--file", "/no/such/file"), "does not exist"),
        (("--messages", __file__), "is not JSON"),
        (("--file", "/bin/sh"), "cannot be read"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], says: str) -> None:
    result = plan("http://127.0.0.1:1", *arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[::bad", "ftp://x"])
def test_a_server_that_cannot_be_asked(url: str) -> None:
    result = plan(url, "hello")
    assert result.exit_code == 1 and f"Error: {url}/v1/cache/plan cannot be asked: " in result.output
    assert result.output.count("\n") == 1


def test_another_kind_of_server() -> None:
    with serve() as server:
        result = plan(f"{server.url}/elsewhere", "hello")
        assert result.exit_code == 1 and "Not Found" in result.output
        result = plan(f"{server.url}/health?", "hello")
        assert result.exit_code == 1
