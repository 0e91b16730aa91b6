"""The command: its options, what they are refused for, and how the server it starts comes to its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

import server.serve
from scheduler.config import EngineConfig, Recovery
from server.cli import main
from server.serve import GRACE, PATIENCE, ServeError, ServeOptions, load_tokenizer, read_template
from server.version import VERSION
from tests.server.tiny_tokenizers import byte_level

Started = list[tuple[EngineConfig, ServeOptions]]

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What `pagekv serve` would have started."""
    calls: Started = []
    monkeypatch.setattr(server.serve, "engine_thread", lambda config: config)
    monkeypatch.setattr(server.serve, "run", lambda config, options: calls.append((config, options)))
    for name in ("MODEL", "HOST", "PORT", "NUM_BLOCKS", "KV_MEMORY", "RECOVERY", "LORA"):
        monkeypatch.delenv(f"PAGEKV_{name}", raising=False)
    return calls


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environment)


def test_two_adapters_of_one_name(started: Started) -> None:
    result = invoke("serve", "--lora", "x=/a", "--lora", "x=/b")
    assert result.exit_code == 2 and "two adapters are called 'x'" in result.output and not started


def test_defaults_are_the_engines(started: Started) -> None:
    assert invoke("serve").exit_code == 0
    assert started == [(EngineConfig(), ServeOptions())]


def test_every_option(started: Started) -> None:
    given = "serve some.gguf --host ::1 --port 0 --dtype bfloat16 --device cpu --block-size 32 --kv-memory 1.5GiB"
    given += " --num-blocks 10 --max-model-len 99 --max-num-seqs 3 --max-num-batched-tokens 77 --recovery truncate"
    given += " --partial-reuse off --served-model-name me --threads 2 --log-level error"
    given += ' --generation-config none --override-generation-config {"top_k":5}'
    given += " --served-model-name myself --cors-origin https://a.example --sse-ping 1.5"
    given += " --keep-alive 5 --max-tokens-policy clamp"
    given += " --pin-share 0.5 --scrub-rate 0 --reveal-cached-tokens on --lora x=/a/b --lora y=c=d"
    given += f" --chat-template {__file__} --tool-call-parser hermes"
    assert invoke(*given.split()).exit_code == 0
    config, options = started[0]
    assert config == EngineConfig(
        model="some.gguf",
        dtype="bfloat16",
        device="cpu",
        block_size=32,
        kv_memory=3 * 2**29,
        num_blocks=10,
        max_model_len=99,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        recovery=Recovery.TRUNCATE,
        partial_reuse=False,
        threads=2,
        generation_config="none",
        sampling_override={"top_k": 5},
        pin_share=0.5,
        scrub_rate=0.0,
        adapters=(("x", "/a/b"), ("y", "c=d")),
    )
    assert options == ServeOptions(
        host="::1",
        port=0,
        model_names=("me", "myself"),
        cors_origins=("https://a.example",),
        sse_ping=1.5,
        reveal_cached_tokens=True,
        chat_template=__file__,
        log_level="error",
        keep_alive=5.0,
        clamps_max_tokens=True,
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temp": 1}', "'temp' is not one of temperature, top_p"),
        ("[1", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_sampling_override(text: str, fault: str, started: Started) -> None:
    result = invoke("serve", "--override-generation-config", text)
    assert result.exit_code == 2 and fault in result.output and not started
    assert len(result.output) < 600


def test_environment_variables_and_their_place(started: Started) -> None:
    result = invoke(
        "serve",
        "--port",
        "9",
        PAGEKV_PORT="8",
        PAGEKV_NUM_BLOCKS="7",
        PAGEKV_MODEL="m",
        PAGEKV_RECOVERY="truncate",
        PAGEKV_LORA="x=/a y=/b",
    )
    assert result.exit_code == 0
    config, options = started[0]
    assert config.adapters == (("x", "/a"), ("y", "/b"))
    assert (options.port, config.num_blocks, config.model, config.recovery) == (9, 7, "m", Recovery.TRUNCATE)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512MiB", 2**29),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5GB", 1_500_000_000),
        ("3kB", 3000),
        ("1TiB", 2**40),
    ],
)
def test_memory(started: Started, text: str, size: int) -> None:
    assert invoke("serve", "--kv-memory", text).exit_code == 0
    assert started[0][0].kv_memory == size


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--chat-template", "/nowhere/a.jinja", "does not exist"),
        ("--block-size", "12", "not a power of two from 1 to 128"),
        ("--block-size", "256", "not a power of two from 1 to 128"),
        ("--block-size", "0", "not a power of two"),
        ("--block-size", "x", "not a power of two"),
        ("--kv-memory", "lots", "not an amount of memory"),
        ("--kv-memory", "-1GiB", "not an amount of memory"),
        ("--kv-memory", "0", "no memory at all"),
        ("--kv-memory", "3 apples", "not an amount of memory"),
        ("--port", "65536", "65535"),
        ("--port", "-1", "65535"),
        ("--num-blocks", "0", "x>=1"),
        ("--max-model-len", "-5", "x>=1"),
        ("--max-num-seqs", "0", "x>=1"),
        ("--max-num-batched-tokens", "1.5", "not a valid integer"),
        ("--threads", "none", "not a valid integer"),
        ("--dtype", "int8", "float32"),
        ("--device", "tpu", "cuda"),
        ("--recovery", "pray", "truncate"),
        ("--partial-reuse", "maybe", "off"),
        ("--log-level", "loud", "debug"),
        ("--pin-share", "1.5", "0.0<=x<=1.0"),
        ("--pin-share", "nan", "no number"),
        ("--scrub-rate", "-1", "0.0<=x<=1000000.0"),
        ("--reveal-cached-tokens", "some", "off"),
        ("--tool-call-parser", "none", "hermes"),
        ("--lora", "x", "not of the form name=path"),
        ("--lora", "=x", "not of the form name=path"),
        ("--no-such-option", "1", "No such option"),
    ],
)
def test_bad_values(started: list[Any], option: str, value: str, says: str) -> None:
    result = invoke("serve", option, value)
    assert result.exit_code == 2 and not started
    assert says in result.output and option in result.output
    assert "Traceback" not in result.output


def test_help_tells_defaults_units_and_variables() -> None:
    text = invoke("serve", "--help", COLUMNS="200").output
    for part in ("default: 8000", "PAGEKV_KV_MEMORY", "Tokens per block", "512MiB", "default: 2048", "PAGEKV_THREADS"):
        assert part in text
    assert invoke("--version").output == f"pagekv {VERSION}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, server.cli; sys.exit(len({'torch', 'transformers', 'fastapi'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.serve_fake", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The next line on stderr that holds `pattern`."""
    assert child.stderr is not None
    for line in child.stderr:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line with {pattern!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_running_streams_and_the_process(number: signal.Signals) -> None:
    with process("0") as child:
        said = line_of(
            child, r"serves toy on (http://\S+) \(cpu, torch, float32, 64 blocks x 16 tokens, max_model_len 512\)"
        )
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", said[1] + "/v1/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2]
        assert child.wait(20) == 0
        assert child.stderr is not None and "Traceback" not in child.stderr.read()


@pytest.mark.parametrize("again", [False, True])
def test_a_client_that_does_not_read_is_waited_for_only_so_long(again: bool) -> None:
    """And not at all after a second Ctrl-C; its handler ends without a traceback."""
    with process("0") as child:
        url = httpx.URL(line_of(child, r"serves toy on (http://\S+)")[1])
        body = json.dumps({"prompt": ["x"] * 64, "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((url.host, url.port))
            client.sendall(POST % (len(body), body))
            time.sleep(4)  # until the server's socket buffer is full
            began = time.monotonic()
            child.send_signal(signal.SIGINT)
            line_of(child, "shutting down")
            if again:
                child.send_signal(signal.SIGINT)
            assert child.wait(20) == 0
            assert (time.monotonic() - began < GRACE) is again
        assert child.stderr is not None and "Traceback" not in child.stderr.read()


def test_a_chat_template_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ServeError, match="cannot read the chat template .*bad.jinja"):
        read_template(str(tmp_path / "bad.jinja"))
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% for %}")
    with pytest.raises(ServeError, match=r"broken.jinja: The chat template does not compile: line 2: "):
        read_template(str(tmp_path / "broken.jinja"))
    (tmp_path / "endless.jinja").write_text("{{ 9 ** (9 ** 9) }}")  # jinja2 computes constants when it compiles
    with pytest.raises(ServeError, match=r"endless.jinja: .* takes more than 1 s of processor time"):
        read_template(str(tmp_path / "endless.jinja"))


def test_a_chat_template_of_the_operators_own(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = load_tokenizer(str(tmp_path), "{{ messages[0].content }}!")
    assert loaded.render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(str(port), "slow") as child:
            _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors == f"Error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_engine_that_does_not_start_is_one_line() -> None:
    with process("0", "broken") as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors == "Error: the weights are upside down\n"


def test_a_second_signal_ends_a_server_whose_engine_hangs() -> None:
    with process("0", "hung") as child:
        line_of(child, "serves toy on")
        child.send_signal(signal.SIGTERM)
        line_of(child, "hanging")
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1 and time.monotonic() - began < PATIENCE / 2
    assert "did not end within 0.8 seconds; ending it by force. Threads: " in errors


@pytest.mark.slow  # as long as PATIENCE
def test_a_first_signal_ends_it_within_its_limit() -> None:
    with process("0", "hung") as child:
        line_of(child, "serves toy on")
        child.send_signal(signal.SIGTERM)
        line_of(child, "hanging")
        assert child.wait(3 * PATIENCE) == 1


def test_a_tokenizer_that_hangs_does_not_hold_up_the_end() -> None:
    """Its client is cut off after the grace that clients get, and nobody waits for its thread."""
    with process("0") as child:
        url = httpx.URL(line_of(child, r"serves toy on (http://\S+)")[1])
        with socket.create_connection((url.host, url.port or 80)) as client:
            body = b'{"prompt": "hang"}'
            client.sendall(POST % (len(body), body))
            line_of(child, "hanging")
            child.send_signal(signal.SIGTERM)
            assert child.wait(3 * PATIENCE) == 0


# From the first import to the last tensor; a few are tried at each run, and many in the slow ones.
FEW, MANY = [0.1, 0.4, 1.0, 2.0], [0.1 + 0.15 * number for number in range(20)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [*FEW, *(pytest.param(delay, marks=pytest.mark.slow) for delay in MANY)])
def test_a_signal_at_any_moment_of_the_start(number: signal.Signals, delay: float) -> None:
    command = [sys.executable, "-m", "server.start", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        time.sleep(delay)
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    has_served = "serves" in errors  # on a fast machine: then it ended in order
    assert child.returncode == (0 if has_served else 128 + number)
    assert "terminate called" not in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads(number: signal.Signals) -> None:
    with process("0", "slow") as child:
        line_of(child, "loading")
        began = time.monotonic()
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert child.returncode == 128 + number
    assert "Traceback" not in errors
