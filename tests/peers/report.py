"""The table of a comparison, in Markdown."""

from __future__ import annotations

import platform
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox.analysis.inference import estimate_effect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND = "make peers"
GOAL = 0.7  # of lerobot's step time, on a CPU
_MIB = 2**20


def render_report(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of all policies."""
    versions = sorted({side["torch"] for result in results for side in result["sides"]})
    method = (
        f"`{COMMAND}` wrote this on {platform.machine()}, torch {', '.join(versions)}, float32, one thread for each side. "
        "Both sides have the same weights, batch and hyperparameters, run in processes of their own and take turns. A step is "
        "forward, backward, clip, AdamW and clearing the gradients. Ratios are of step times, paired by turn, with an interval "
        f"at 99 %; the goal is {GOAL} on a CPU. The resident peak includes the libraries."
    )
    lines = ["# Training steps beside lerobot's", "", method]
    for result in results:
        title = f"## {result['policy']} {result['size']}, {result['parameters'] / 1e6:.1f} M parameters"
        lines += ["", title, "", *_table(result)]
    return "\n".join(lines) + "\n"


def _table(result: Mapping[str, Any]) -> list[str]:
    theirs = [side for side in result["sides"] if side["name"] != "benchbox"]
    names = [f"over {side['name']}, {side['variant']}" for side in theirs]
    head = ["side", "step", "forward", "backward", "clip + AdamW", "resident peak", "loss", *names]
    rows = [head, ["---"] * len(head)]
    for side in result["sides"]:
        ratios = [_ratio(side, other) if side["name"] == "benchbox" else "" for other in theirs]
        rows.append([f"{side['name']}, {side['variant']}", *_figures(side), *ratios])
    return [f"| {' | '.join(row)} |" for row in rows]


def _figures(side: Mapping[str, Any]) -> list[str]:
    turns = side["turns"]

    def time_ms(*phases: str) -> str:
        steps = zip(*([second for turn in turns for second in turn["phases_s"][phase]] for phase in phases), strict=True)
        return f"{1000 * median(map(sum, steps)):.1f} ms"

    step_ms = 1000 * median(second for turn in turns for second in turn["step_s"])
    peak = max(turn["rss"] for turn in turns) / _MIB
    return [
        f"{step_ms:.1f} ms",
        time_ms("forward"),
        time_ms("backward"),
        time_ms("clip", "optimizer"),
        f"{peak:.0f} MiB",
        f"{side['losses'][0]:.4f} -> {turns[-1]['losses'][-1]:.4f}",
    ]


def _ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    effect = estimate_effect(_medians(ours), _medians(theirs))
    if effect.low is None or effect.high is None:
        return f"{effect.ratio:.2f}, too few turns"
    return f"{effect.ratio:.2f} ({effect.low:.2f} to {effect.high:.2f})"


def _medians(side: Mapping[str, Any]) -> dict[int, float]:
    return {number: median(turn["step_s"]) for number, turn in enumerate(side["turns"], 1)}
