"""How long other requests wait while one client sends what is large: `/health` beside each of the bodies that held the
event loop.

    python -m benchmarks.event_loop --model DIRECTORY_OR_GGUF [--seconds 3] [--only NAME]

Each body is sent over and over for so many seconds by one client, and `/health` is asked every 5 ms by another, both in
processes of their own. The last line is one JSON document: milliseconds of `/health` for each body, its statuses, and
what memory the server and its processes had at most and at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

Json = dict[str, Any]
MEGABYTES = 4_000_000  # of text, below the limit of a body
TEXT = [{"type": "text", "text": "x"}]


def chat(content: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


BODIES: dict[str, tuple[str, Callable[[], Json]]] = {
    "nothing": ("", dict),
    "100,000 content parts": ("/v1/chat/completions", lambda: chat(TEXT * 100_000)),
    "2,000,000 token ids": ("/v1/completions", lambda: {"prompt": [1] * 2_000_000, "max_tokens": 1}),
    "1,000,000 token ids": ("/v1/completions", lambda: {"prompt": [1] * 1_000_000, "max_tokens": 1}),
    "4,000 messages x 20 blocks": (
        "/v1/messages",
        lambda: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT * 20}] * 4000},
    ),
    "4,000 messages x 2 parts": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "user", "content": TEXT * 2}] * 4000, "max_tokens": 1},
    ),
    "1,000,000 allowed_token_ids": (
        "/v1/completions",
        lambda: {"prompt": "x", "max_tokens": 1, "allowed_token_ids": list(range(1_000_000))},
    ),
    "tokenize 4 MB of words": ("/tokenize", lambda: {"prompt": "the quick " * (MEGABYTES // 10)}),
    "tokenize 4 MB of digits": ("/tokenize", lambda: {"prompt": "1" * MEGABYTES}),
    "truncate 2.7 MB": (
        "/v1/completions",
        lambda: {"prompt": "1 2 3 " * 450_000, "truncate_prompt_tokens": 8, "max_tokens": 1},
    ),
    "detokenize 1,000,000 ids": ("/detokenize", lambda: {"tokens": [40] * 1_000_000}),
    "4 MB of chat": ("/v1/chat/completions", lambda: chat("the quick " * (MEGABYTES // 10))),
}


def probe(url: str, seconds: float) -> None:
    """Milliseconds of `/health`, one a line."""
    with httpx.Client(base_url=url, timeout=120) as client:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            client.get("/health").raise_for_status()
            print(1000 * (time.perf_counter() - began))
            time.sleep(0.005)


def send(url: str, path: str, body: Path, seconds: float) -> None:
    """Statuses, one a line. A client that has had its time leaves."""
    content = body.read_bytes()
    ends = time.monotonic() + seconds
    with httpx.Client(base_url=url, headers={"content-type": "application/json"}) as client:
        while (left := ends - time.monotonic()) > 0:
            try:
                print(client.post(path, content=content, timeout=max(left, 0.1)).status_code)
            except httpx.TimeoutException:
                print("left")


@contextmanager
def serving(model: str) -> Iterator[tuple[str, int]]:
    """Address and process id of `pagekv serve`."""
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", "0", "--served-model-name", "m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if " serves " in line)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield line.split(" on ")[1].split()[0], server.pid
        finally:
            server.terminate()
            server.wait()


def memory(pid: int) -> int:
    """Bytes resident, of a process and its children."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure(url: str, pid: int, name: str, seconds: float, folder: Path) -> Json:
    path, make = BODIES[name]
    (folder / "body.json").write_text(json.dumps(make()), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.event_loop", "--url", url, "--seconds", str(seconds)]
    probing = subprocess.Popen([*command, "--probe"], stdout=subprocess.PIPE, text=True)
    sending = None
    if path:
        sending = subprocess.Popen(
            [*command, "--send", path, "--body", str(folder / "body.json")], stdout=subprocess.PIPE, text=True
        )
    peak = 0
    while probing.poll() is None:
        peak = max(peak, memory(pid))
        time.sleep(0.1)
    times = sorted(map(float, probing.communicate()[0].split()))
    statuses = Counter(sending.communicate()[0].split()) if sending else {}
    time.sleep(1)
    return {
        "requests": len(times),
        "p50_ms": round(times[len(times) // 2], 1),
        "p99_ms": round(times[int(0.99 * (len(times) - 1))], 1),
        "max_ms": round(times[-1], 1),
        "statuses": dict(statuses),
        "peak_mib": peak >> 20,
        "after_mib": memory(pid) >> 20,
    }


def run(model: str, seconds: float, names: list[str]) -> Json:
    with tempfile.TemporaryDirectory() as folder, serving(model) as (url, pid):
        found: Json = {"model": model, "cores": psutil.cpu_count(), "bodies": {}}
        for name in names:
            found["bodies"][name] = measure(url, pid, name, seconds, Path(folder))
            print(f"{name:30} {found['bodies'][name]}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="a model directory or a .gguf file")
    parser.add_argument("--seconds", type=float, default=3.0, help="for how long each body is sent")
    parser.add_argument("--only", action="append", choices=BODIES, help="this body alone; may be repeated")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--body", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(options.url, options.seconds)
    elif options.send:
        send(options.url, options.send, options.body, options.seconds)
    elif options.model:
        print(json.dumps(run(options.model, options.seconds, options.only or list(BODIES))))
    else:
        parser.error("--model is required")


if __name__ == "__main__":
    main()
