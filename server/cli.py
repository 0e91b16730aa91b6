"""The command: `pagekv serve [MODEL]`, and `pagekv plan`, which asks a server that runs.

Nothing heavy is imported before the options are known to be good, so that `--help` and a typo answer at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from scheduler.config import EngineConfig, Recovery
from scheduler.sampling_defaults import BadDefault, SamplingDefaults
from server.plan_command import plan
from server.tools import DEFAULT_FORMAT, FORMAT_NAMES
from server.version import VERSION

Command = TypeVar("Command", bound=Callable[..., Any])

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
UNITS |= {f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")}


class Memory(click.ParamType[int]):
    """Bytes, with or without a unit: 512MiB, 2GiB, 1.5GB, 1073741824."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        units = {unit.lower(): size for unit, size in UNITS.items()}
        if match is None or match[2].lower() not in units:
            self.fail(f"{value!r} is not an amount of memory such as 2GiB, 512MiB or 1073741824 (bytes).", param, ctx)
        size = int(float(match[1]) * units[match[2].lower()])
        if size < 1:
            self.fail(f"{value!r} is no memory at all.", param, ctx)
        return size


class PowerOfTwo(click.ParamType[int]):
    name = "integer"

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        number = int(text) if text.isdecimal() else 0
        if not 1 <= number <= self.largest or number & (number - 1):
            self.fail(f"{value!r} is not a power of two from 1 to {self.largest}.", param, ctx)
        return number


class Adapter(click.ParamType[tuple[str, str]]):
    """A LoRA adapter: name=path."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, _, path = str(value).partition("=")
        if not name or not path:
            self.fail(f"{value!r} is not of the form name=path.", param, ctx)
        return name, path


def without_doubles(
    _: click.Context, param: click.Parameter, adapters: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    names = [name for name, _ in adapters]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"two adapters are called {name!r}.", param=param)
    return adapters


class SamplingOverride(click.ParamType[dict[str, Any]]):
    """A JSON object of sampling fields."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            self.fail(f"{shortened(value)!r} is not valid JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f'{shortened(value)!r} is not a JSON object such as {{"temperature": 0.2}}.', param, ctx)
        try:
            SamplingDefaults.of(found)
        except BadDefault as error:
            self.fail(f"{error}.", param, ctx)
        return found


def shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "\N{HORIZONTAL ELLIPSIS}"


class Number(click.FloatRange):
    """A float within a range, which click's own range takes NaN for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is no number.", param, ctx)
        return number


POSITIVE = click.IntRange(min=1)
DEFAULTS = EngineConfig()


def option(name: str, *names: str, **settings: Any) -> Callable[[Command], Command]:
    """An option that is also read from PAGEKV_<NAME>; a default of None is told in the help text."""
    settings.setdefault("show_default", settings.get("default") is not None)
    variable = "PAGEKV_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *names, envvar=variable, show_envvar=True, **settings)


def quiet_threads() -> None:
    """Compute threads that wait for one another sleep instead of spinning; to be said before torch is loaded.

    A thread that spins for a peer which is not running takes the core the peer needs: with other work on the cores a
    step was 3 to 14 times slower. Sleeping costs 10 to 20 % on an idle machine (docs/log.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@click.group(context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="pagekv", message="%(prog)s %(version)s")
def main() -> None:
    """A paged KV-cache server for language models with OpenAI's API."""


@main.command()
@click.argument("model", required=False, envvar="PAGEKV_MODEL")
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="TCP port; 0 picks a free one.")
@option(
    "--dtype",
    default=DEFAULTS.dtype,
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Of weights, compute and cache. auto: what the machine is fast in.",
)
@option("--device", default=DEFAULTS.device, type=click.Choice(["auto", "cpu", "cuda"]), help="Where the model runs.")
@option(
    "--backend",
    default=DEFAULTS.backend,
    type=click.Choice(["auto", "c", "torch"]),
    help="What computes on the CPU. auto: C where the processor and the model's shapes allow, else torch.",
)
@option(
    "--weights",
    default=DEFAULTS.weights,
    type=click.Choice(["auto", "quantized", "bfloat16"]),
    help="Quantized matrices as the file has them, or unpacked to --dtype. Same answers bit for bit; auto: by speed.",
)
@option("--block-size", default=DEFAULTS.block_size, type=PowerOfTwo(128), help="Tokens per block; a power of two.")
@option("--kv-memory", type=Memory(), help="Cache size: bytes, or 512MiB, 2GiB. [default: a share of free memory]")
@option("--num-blocks", type=POSITIVE, help="Cache size in blocks; goes before --kv-memory.")
@option(
    "--max-model-len",
    type=POSITIVE,
    help="Tokens of prompt and output together. [default: the model's own, as far as the cache holds it]",
)
@option("--max-num-seqs", default=DEFAULTS.max_num_seqs, type=POSITIVE, help="Requests that run at once.")
@option(
    "--max-num-batched-tokens",
    default=DEFAULTS.max_num_batched_tokens,
    type=POSITIVE,
    help="Tokens computed in one step.",
)
@option(
    "--recovery",
    default=DEFAULTS.recovery.value,
    type=click.Choice([policy.value for policy in Recovery]),
    help="After a lost block: repair it alone, or compute all that follows (truncate).",
)
@option(
    "--partial-reuse",
    default="on",
    type=click.Choice(["on", "off"]),
    help="Copy the leading tokens that a block shares with a cached one.",
)
@option(
    "--pin-share",
    default=DEFAULTS.pin_share,
    type=Number(0.0, 1.0),
    help="Share of the blocks that requests may pin.",
)
@option(
    "--scrub-rate",
    default=DEFAULTS.scrub_rate,
    type=Number(0.0, 1e6),
    help="Cached blocks whose checksums are compared per second; 0 for none.",
)
@option(
    "--tool-call-parser",
    default=DEFAULT_FORMAT,
    type=click.Choice(FORMAT_NAMES),
    help="How the model writes calls of tools.",
)
@option(
    "--reveal-cached-tokens",
    default="off",
    type=click.Choice(["on", "off"]),
    help="Plans name the cached token where a prompt first differs, which lets whoever asks read others' prompts.",
)
@option(
    "--lora",
    multiple=True,
    type=Adapter(),
    callback=without_doubles,
    help="A LoRA adapter to serve as a model of its own: name=directory. May be repeated.",
)
@option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    help="A file with a chat template (Jinja, run in a sandbox). [default: the model's own]",
)
@option(
    "--max-tokens-policy",
    default="refuse",
    type=click.Choice(["refuse", "clamp"]),
    help="A request for more tokens than the context has room for: refuse it, or generate as many as fit (clamp).",
)
@option(
    "--keep-alive",
    default=75.0,
    type=Number(0.1, 86400.0),
    help="Seconds that a connection stays open between two requests.",
)
@option(
    "--served-model-name",
    multiple=True,
    help="What clients call the model. May be repeated: it answers to each name, and answers give the first. "
    "[default: the model's own name]",
)
@option(
    "--cors-origin",
    multiple=True,
    help="An origin whose web pages may read answers, such as https://chat.example.com; * for all. May be repeated.",
)
@option(
    "--sse-ping",
    default=5.0,
    type=Number(0.0, 3600.0),
    help="Seconds of silence in a stream after which a ping is sent; 0 for none.",
)
@option(
    "--generation-config",
    default=DEFAULTS.generation_config,
    type=click.Choice(["auto", "none"]),
    help="Sampling defaults of requests that leave them out. auto: those of the model's own files; none: OpenAI's.",
)
@option(
    "--override-generation-config",
    "sampling_override",
    type=SamplingOverride(),
    default="{}",
    help="Sampling defaults that override --generation-config, as JSON: "
    "temperature, top_p, top_k, min_p, repetition_penalty.",
)
@option("--threads", type=POSITIVE, help="Compute threads. [default: all cores this process may use]")
@option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="debug also logs each HTTP request, and what it found in the cache.",
)
def serve(
    host: str,
    port: int,
    served_model_name: tuple[str, ...],
    cors_origin: tuple[str, ...],
    sse_ping: float,
    log_level: str,
    recovery: str,
    partial_reuse: str,
    tool_call_parser: str,
    reveal_cached_tokens: str,
    lora: tuple[tuple[str, str], ...],
    chat_template: str | None,
    max_tokens_policy: str,
    keep_alive: float,
    **engine_options: Any,
) -> None:
    """Serve MODEL over HTTP: a .gguf file, a local Hugging Face directory, or a hub id.

    Without MODEL, serve SmolLM2-135M-Instruct.
    """
    config = EngineConfig(
        recovery=Recovery(recovery), partial_reuse=partial_reuse == "on", adapters=lora, **engine_options
    )
    quiet_threads()
    from server.serve import ServeError, ServeOptions, engine_thread, run

    options = ServeOptions(
        host=host,
        port=port,
        model_names=served_model_name,
        cors_origins=cors_origin,
        sse_ping=sse_ping,
        tool_call_parser=tool_call_parser,
        reveal_cached_tokens=reveal_cached_tokens == "on",
        chat_template=chat_template,
        log_level=log_level,
        clamps_max_tokens=max_tokens_policy == "clamp",
        keep_alive=keep_alive,
    )
    try:
        run(engine_thread(config), options)
    except ServeError as error:
        raise click.ClickException(str(error)) from None


main.add_command(plan)

if __name__ == "__main__":
    from server.start import main as start

    start()
