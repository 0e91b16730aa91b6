"""The command, the default model, the official client: what a newcomer does first."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"


class Server:
    """`pagekv serve` as its own process, on a free port."""

    def __init__(self, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            "from server.cli import main; main()",
            "serve",
            "--port",
            str(self.port),
            *args,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ)
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"the server is not up: {self.end(signal.SIGKILL)}")

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return said


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--kv-memory", "512MiB", "--max-model-len", "2048")
    server.wait()
    yield server
    if server.process.poll() is None:
        server.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_stream_equals_the_whole_and_is_warm(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Name three colours of the rainbow."}]
    whole = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    pieces, usage = [], None
    for chunk in client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=question,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None and whole.usage is not None
    assert usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_completion_of_ids_and_of_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The opposite of hot is", temperature=0, max_tokens=8)
    assert re.search(r"\bcold\b", answer.choices[0].text)
    ids = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], temperature=0, max_tokens=8)
    assert ids.usage is not None and ids.usage.prompt_tokens == 5 and ids.usage.completion_tokens == 8


def test_the_books_balance(server: Server) -> None:
    """Every prompt token was computed or came from the cache; no block is left in use."""
    text = httpx.get(f"{server.url}/metrics").text
    total = {}
    for source in ("computed", "reused", "copied", "pending"):
        found = re.search(rf'pagekv_prompt_tokens_total{{.*source="{source}".*}} (\S+)', text)
        assert found is not None, source
        total[source] = float(found[1])
    prompt = re.search(r"vllm:prompt_tokens_total{.*} (\S+)", text)
    assert prompt is not None and float(prompt[1]) == sum(total.values()) > 0
    usage = re.search(r"vllm:kv_cache_usage_perc{.*} (\S+)", text)
    assert usage is not None and float(usage[1]) == 0


def test_interrupted_it_ends_cleanly(server: Server) -> None:
    said = server.end(signal.SIGINT)
    assert server.process.returncode == 0
    assert "Traceback" not in said
