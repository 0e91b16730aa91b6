"""`pagekv plan`: what a running server would reuse and compute for a prompt, as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

TIMEOUT = 60.0  # seconds; a plan waits for the step under way
WIDTH = 160  # columns of a table that goes into a file


class PlanFailed(click.ClickException):
    """The server cannot be asked (exit code 1), or refuses (also 1); bad arguments are click's own (2)."""


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    envvar="PAGEKV_URL",
    show_envvar=True,
    show_default=True,
    help="Where the server listens.",
)
@click.option("--model", help="The model or adapter. [default: the base model]")
@click.option("--salt", help="The cache_salt that the prompt is sent with.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A prompt's text.")
@click.option(
    "--messages",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A chat's messages, as JSON: a list, or an object that holds one as a chat request does.",
)
@click.option("--ids", help="Token ids, separated by commas.")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as it is, with whole hashes.")
def plan(
    prompt: str | None,
    url: str,
    model: str | None,
    salt: str | None,
    file: Path | None,
    messages: Path | None,
    ids: str | None,
    as_json: bool,
) -> None:
    """Tell what a running server would reuse and compute for PROMPT, block by block, and why.

    Nothing is computed, and the cache is left as it is.
    """
    given = [value for value in (prompt, file, messages, ids) if value is not None]
    if len(given) != 1:
        raise click.UsageError("Exactly one of PROMPT, --file, --messages and --ids is wanted.")
    body = asked(prompt, file, messages, ids)
    body |= {name: value for name, value in (("model", model), ("cache_salt", salt)) if value is not None}
    answer = ask(url.rstrip("/") + "/v1/cache/plan", body)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(answer)


def asked(prompt: str | None, file: Path | None, messages: Path | None, ids: str | None) -> dict[str, Any]:
    """The prompt as a body for the server."""
    if ids is not None:
        try:
            return {"prompt": [int(part) for part in ids.split(",")]}
        except ValueError:
            raise click.BadParameter(f"{ids!r} is not a list of integers, as in 1,2,3.", param_hint="--ids") from None
    if messages is not None:
        try:
            content = json.loads(read(messages, "--messages"))
        except ValueError as error:
            raise click.BadParameter(f"{messages} is not JSON: {error}.", param_hint="--messages") from None
        return content if isinstance(content, dict) else {"messages": content}
    return {"prompt": read(file, "--file") if file is not None else prompt}


def read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}.", param_hint=option) from None


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's plan. Raises PlanFailed."""
    import httpx

    try:
        response = httpx.post(url, json=body, timeout=TIMEOUT)
        answer = response.json()
        if response.is_success and isinstance(answer["blocks"], list):
            return dict(answer)
        error = answer["error"]
        raise PlanFailed(f"{error['message']} (HTTP {response.status_code})")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlanFailed(f"{url} cannot be asked: {str(error) or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise PlanFailed(f"{url} does not answer as a pagekv server does (HTTP {response.status_code}).") from None


def show(plan: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(plan["blocks"]))
    computed = ", ".join(positions(start, end) for start, end in plan["computed"])
    console.print(
        f"{plan['prompt_tokens']} tokens: {plan['reused']} reused, {plan['copied']} copied, {plan['loaded']} loaded, "
        f"{plan['pending']} pending; valid prefix {plan['valid_prefix']}"
    )
    console.print(f"computed: {computed}")


def table(blocks: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE)
    for heading in ("block", "positions", "status", "tier", "reason", "first difference", "hash"):
        made.add_column(heading, justify="right" if heading == "block" else "left", no_wrap=True)
    for block in blocks:
        made.add_row(
            str(block["index"]),
            positions(block["start"], block["end"]),
            block["status"],
            block["tier"],
            block["reason"],
            difference(block["first_difference"]),
            (block["hash"] or "")[:12],
        )
    return made


def positions(start: int, end: int) -> str:
    return f"{start}..{end - 1}" if end - start > 1 else str(start)


def difference(found: dict[str, int] | None) -> str:
    if found is None:
        return ""
    token = f" (cached token {found['cached_token']})" if "cached_token" in found else ""
    return f"{found['position']}{token}"
