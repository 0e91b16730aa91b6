"""The block-loss curve as a picture: tokens computed and time to first token against the share of blocks lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import Result

STYLES: dict[str, dict[str, Any]] = {
    "repair": {"color": "#1b7f3b", "marker": "o"},
    "truncate": {"color": "#c2571a", "marker": "s", "linestyle": "--"},
}
# Text stays text, and two runs with the same numbers give the same file.
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pagekv",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(path: Path, curve: Mapping[str, Mapping[int, Result]], prompt_tokens: int) -> None:
    """Writes an SVG. `curve`: policy -> share lost in per cent -> its samples, `computed` and `ttft` among them."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        _panel(left, curve, "computed", lambda tokens: tokens)
        left.axhline(prompt_tokens, color="#888888", linewidth=0.8, linestyle=":")
        left.text(50, prompt_tokens * 1.015, "the whole prompt", ha="right", va="bottom", color="#666666", fontsize=9)
        left.set(title="Tokens computed", ylabel="tokens", ylim=(0, prompt_tokens * 1.12))
        _panel(right, curve, "ttft", lambda milliseconds: milliseconds / 1e3)
        right.set(title="Time to first token", ylabel="seconds", ylim=(0, None))
        left.legend(loc="upper left", bbox_to_anchor=(0.3, 0.85), frameon=False, title="--recovery", alignment="left")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _panel(
    axes: Axes, curve: Mapping[str, Mapping[int, Result]], quantity: str, scaled: Callable[[float], float]
) -> None:
    """A line through the medians of each policy, and a faint dot for every single value."""
    for policy, points in curve.items():
        style = STYLES[policy]
        single = [(share, scaled(value)) for share, result in points.items() for value in result[quantity].values]
        axes.scatter(*zip(*single, strict=True), s=12, alpha=0.3, color=style["color"], linewidths=0)
        medians = [scaled(result[quantity].median) for result in points.values()]
        axes.plot(list(points), medians, label=policy, linewidth=1.8, markersize=5, **style)
    axes.set_xlabel("share of the prompt's blocks lost (%)")
    axes.set_xticks([0, 5, 10, 25, 50])
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
