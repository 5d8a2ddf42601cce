"""The tables of a comparison, in Markdown."""

from __future__ import annotations

import platform
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox.analysis.inference import estimate_effect
from tests.peers.side import KERNELS_ALONE, OURS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND = "make peers"
GOAL, GPU_GOAL = 0.7, 0.75  # of lerobot's step time, on a CPU and on a GPU
_MIB, _GIB = 2**20, 2**30
_TIMES = ("step", "forward", "backward", "clip + AdamW")


def render_report(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of all policies."""
    versions = sorted({side["torch"] for result in results for side in result["sides"]})
    method = (
        f"`{COMMAND}` wrote this on {platform.machine()}, torch {', '.join(versions)}, float32, one thread for each side. "
        "Both sides have the same weights, batch and hyperparameters, run in processes of their own and take turns. A step is "
        "forward, backward, clip, AdamW and clearing the gradients. Ratios are of step times, paired by turn, with an interval "
        f"at 99 %; the goal is {GOAL} on a CPU. The resident peak includes the libraries.\n\n"
        f"'{KERNELS_ALONE.capitalize()}' are the matrix products, convolutions and attention of a step of benchbox, called "
        "again on their tensors, with nothing between them: no step that calls them takes less. Sides of benchbox are compiled "
        "layer by layer (`compile: blocks`) unless they say otherwise; lerobot's are compiled as a whole."
    )
    lines = ["# Training steps beside lerobot's", "", method]
    for result in results:
        lines += ["", _title(result), "", *_padding(result), *_table(result)]
    return "\n".join(lines) + "\n"


def render_gpu_report(run: Mapping[str, Any]) -> str:
    """Return the tables of a comparison on a GPU, one for each precision of lerobot."""
    versions = f"torch {run['torch']}, transformers {run['transformers']} for lerobot"
    method = (
        f"`{run['command']}` wrote this on {run['device']}, {versions}. "
        "Both sides have the same weights, which bfloat16 represents, the same batch and the same hyperparameters, and run in "
        "processes of their own; those of one wave take turns, others run one after the other. A step is forward, backward, "
        "clip, AdamW and clearing the gradients, timed by CUDA events. In bfloat16 lerobot's vision tower and norms stay in "
        "float32, and its trainer enters autocast; it reads the gradient norm after every step, for its log, so that its host "
        "waits there and benchbox's does not. Ratios are of step times, with an interval at 99 %; the goal is "
        f"{GPU_GOAL} on a GPU. The peak is that of the caching allocator in timed steps."
    )
    lines = ["# Training steps beside lerobot's on a GPU", "", method]
    lines += ["", run["note"]] if "note" in run else []
    for result in run["results"]:
        title = f"{_title(result)}, {result['batch']} samples, lerobot in {result['precision']}"
        lines += ["", title, "", *_table(result), *_first_losses(result)]
    return "\n".join(lines) + "\n"


def _title(result: Mapping[str, Any]) -> str:
    return f"## {result['policy']} {result['size']}, {result['parameters'] / 1e6:.1f} M parameters"


def _padding(result: Mapping[str, Any]) -> list[str]:
    """Return a line on what is padding in every sample; reports from before it could be left out do not know it."""
    padding = result.get("padding")
    if padding is None:
        return []
    cameras, tokens = (f"{padding[name] - padding[f'{name}_kept']} of {padding[name]}" for name in ("cameras", "prompt_tokens"))
    line = (
        f"For every sample of the batch {cameras} cameras and {tokens} prompt tokens are padding, which takes "
        f"{padding['flops']:.0%} of the FLOPs of a step. Sides with 'padding left out' train the same batch without it."
    )
    return [line, ""]


def _table(result: Mapping[str, Any]) -> list[str]:
    complete = [side for side in result["sides"] if side["turns"]]
    theirs = [side for side in complete if side["name"] not in (OURS, KERNELS_ALONE)]
    on_gpu = any("cuda_bytes" in turn for side in complete for turn in side["turns"])
    columns = [*_TIMES, "peak" if on_gpu else "resident peak", "loss", *(f"over {_label(side)}" for side in theirs)]
    rows = [["side", *columns], ["---"] * (len(columns) + 1)]
    for side in result["sides"]:
        if side in complete:
            ratios = ["" if side in theirs else _ratio(side, other) for other in theirs]
            cells = [*_figures(side), *ratios]
        else:
            cells = [side["error"].replace("|", "/"), *[""] * (len(columns) - 1)]
        rows.append([_label(side), *cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def _label(side: Mapping[str, Any]) -> str:
    return ", ".join(side[key] for key in ("name", "variant", "precision") if key in side)


def _figures(side: Mapping[str, Any]) -> list[str]:
    turns, alone = side["turns"], side["name"] == KERNELS_ALONE

    def time_ms(*phases: str) -> str:
        steps = zip(*([second for turn in turns for second in turn["phases_s"][phase]] for phase in phases), strict=True)
        return f"{1000 * median(map(sum, steps)):.1f} ms"

    step_ms = 1000 * median(second for turn in turns for second in turn["step_s"])
    return [
        f"{step_ms:.1f} ms",
        time_ms("forward"),
        time_ms("backward"),
        "" if alone else time_ms("clip", "optimizer"),
        _peak(turns),
        "" if alone else f"{side['losses'][0]:.4f} -> {turns[-1]['losses'][-1]:.4f}",
    ]


def _peak(turns: Sequence[Mapping[str, Any]]) -> str:
    if "cuda_bytes" in turns[0]:
        return f"{max(turn['cuda_bytes'] for turn in turns) / _GIB:.2f} GiB"
    return f"{max(turn['rss'] for turn in turns) / _MIB:.0f} MiB"


def _first_losses(result: Mapping[str, Any]) -> list[str]:
    """Return a line with the largest relative difference of losses in the first step, if both sides have taken one."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    for side in result["sides"]:
        losses[side["name"] == OURS] += side.get("losses", [])
    differences = [abs(ours / theirs - 1) for ours in losses[True] for theirs in losses[False]]
    return ["", f"Losses of the first step differ by {max(differences):.1e} at most."] if differences else []


def _ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    effect = estimate_effect(_medians(ours), _medians(theirs), same_run=ours.get("wave") == theirs.get("wave"))
    if effect.low is None or effect.high is None:
        return f"{effect.ratio:.2f}, too few turns"
    return f"{effect.ratio:.2f} ({effect.low:.2f} to {effect.high:.2f})"


def _medians(side: Mapping[str, Any]) -> dict[int, float]:
    return {number: median(turn["step_s"]) for number, turn in enumerate(side["turns"], 1)}
