"""Write this folder from runs/: trainings.json, the records of the evaluations, films, report.html and report.md.

Run it in the root of the repository, after the commands of docs/evaluation.md: python reports/collapse/render.py
Without runs/ it renders what this folder has.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchbox.analysis.proportion import wilson_interval
from benchbox.report.evaluation import (
    EvaluationReport,
    EvaluationRow,
    build_evaluation_report,
    training_drawing,
    write_evaluation_report,
)
from benchbox.report.figures.curves import Curve
from benchbox.store.files import read_json, write_json
from benchbox.trainer.checkpoint import load_policy

HERE = Path(__file__).parent
TRAININGS, EVALUATIONS, AUDITS = Path("runs/train"), Path("runs/evaluations"), Path("runs/audits")
FILMS = Path("runs/films")  # evaluations of one episode, whose stills are shown in place of those of the first episodes
PRETRAINED = Path("runs/pretrained/model.safetensors")
START = "pretrained"  # name of the evaluation before any of the trainings
RECIPES = ("bf16_master", "bf16_pure")
OTHERS = ("lr2.5e-5-*", "bf16_stochastic-*")  # trainings for comparison, which are not counted together
WINDOW = 50  # steps whose losses are averaged
TITLE = "bfloat16 without masters: the success rate of a fine-tuned policy"


def collect_training(folder: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the course of a training: mean losses by window of steps, shares of changed weights, and the audit's findings."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    cell = read_json(checkpoints[-1] / "checkpoint.json")["cell"]
    losses = read_losses(folder)
    changes = []
    for checkpoint in checkpoints:
        weights = load_weights(checkpoint)
        changes.append(
            {
                "step": int(checkpoint.name.removeprefix("step-")),
                "changed": share_changed(start, weights),
                "by_magnitude": by_magnitude(start, weights, cell["optim"]["lr"]),
            }
        )
    return {
        "name": folder.name,
        "recipe": cell["recipe"],
        "lr": cell["optim"]["lr"],
        "seed": cell["seed"],
        "batch": cell["batch"],
        "steps": len(losses),
        "loss_window_steps": WINDOW,
        "loss_means": window_means(losses),
        "weights": changes,
        "audit": read_findings(AUDITS / f"{folder.name}.json"),
    }


def read_losses(folder: Path) -> list[float]:
    """Return the loss of every step of a training."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def window_means(losses: list[float]) -> list[float]:
    """Return the means of consecutive windows of losses."""
    windows = [losses[start : start + WINDOW] for start in range(0, len(losses) - WINDOW + 1, WINDOW)]
    return [round(sum(window) / WINDOW, 4) for window in windows]


def read_findings(path: Path) -> list[dict[str, str]]:
    """Return what `benchbox audit-precision --format json` found, without evidence."""
    return [{key: finding[key] for key in ("code", "severity", "title")} for finding in read_json(path)["findings"]]


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in bfloat16, as the policy computes with them."""
    policy = load_policy(checkpoint, [HERE / "policies"])
    assert isinstance(policy, torch.nn.Module)
    return {name: parameter.detach().bfloat16() for name, parameter in policy.named_parameters()}


def share_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the share of the elements that differ between two checkpoints."""
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    return round(changed / sum(tensor.numel() for tensor in after.values()), 4)


def by_magnitude(start: dict[str, torch.Tensor], after: dict[str, torch.Tensor], lr: float) -> dict[str, float]:
    """Return the shares of changed weights below and above 512 lr, where an update of lr is half the distance of numbers."""
    threshold = 512 * lr
    magnitude = torch.cat([start[name].float().abs().flatten() for name in after])
    changed = torch.cat([(after[name] != start[name]).flatten() for name in after])
    above = magnitude > threshold
    return {
        "threshold": round(threshold, 6),
        "share_above": round(float(above.float().mean()), 4),
        "changed_above": round(float(changed[above].float().mean()), 6),
        "changed_below": round(float(changed[~above].float().mean()), 4),
    }


def collect() -> None:
    """Copy what the report shows from runs/ into this folder."""
    start = {name: tensor.bfloat16() for name, tensor in load_file(PRETRAINED).items()}
    patterns = [*(f"{recipe}-*" for recipe in RECIPES), *OTHERS]
    names = [folder.name for pattern in patterns for folder in sorted(TRAININGS.glob(pattern))]
    folders = [TRAININGS / name for name in names if (EVALUATIONS / name / "evaluation.json").is_file()]
    pretraining = window_means(read_losses(TRAININGS / "pretrain"))
    trainings = [collect_training(folder, start) for folder in folders]
    write_json(HERE / "trainings.json", {"pretraining_loss_means": pretraining, "trainings": trainings})
    for folder in (EVALUATIONS, FILMS):
        shutil.rmtree(HERE / folder.name, ignore_errors=True)
        shutil.copytree(folder, HERE / folder.name, ignore=shutil.ignore_patterns("*.html", "*.md"))


def build_report(trainings: list[dict[str, Any]]) -> EvaluationReport:
    """Build the report from the files of this folder."""
    report = build_evaluation_report([HERE / "evaluations" / name for name in (START, *(t["name"] for t in trainings))])
    films = {path.name: build_evaluation_report([path]).rows[0].filmed for path in (HERE / FILMS.name).iterdir()}
    start = replace(
        report.rows[0], name=START, training="fp32 on four other tasks, seed 0: where all trainings start", filmed=()
    )
    rows = [replace(row, filmed=films.get(t["name"], ())) for row, t in zip(report.rows[1:], trainings, strict=True)]
    equal = [t for t in trainings if t["name"] == f"{t['recipe']}-{t['seed']}" and t["recipe"] in RECIPES]
    pooled = [pool([row for row, training in zip(rows, equal, strict=False) if training["recipe"] == r]) for r in RECIPES]
    return replace(
        report,
        title=TITLE,
        rows=(start, *rows[: len(equal)], *pooled, *rows[len(equal) :]),
        paragraphs=(
            *(HERE / "findings.txt").read_text(encoding="utf-8").strip().splitlines(),
            *(describe(training) for training in trainings),
        ),
        figures=(
            training_drawing(
                "loss",
                "Loss by step",
                f"Flow matching loss, mean of {WINDOW} steps.",
                tuple(loss_curve(training) for training in trainings),
            ),
            training_drawing(
                "changed",
                "Weights that have moved, by step",
                "Share of the bfloat16 weights that differ from the pretrained ones, in %.",
                tuple(change_curve(training) for training in trainings),
            ),
        ),
    )


def title(training: dict[str, Any]) -> str:
    """Return the name of a training in a legend."""
    return f"{training['recipe']}, lr {training['lr']:g}, seed {training['seed']}"


def describe(training: dict[str, Any]) -> str:
    """Return what was measured in a training: the last losses, the weights that moved, and the audit's findings."""
    losses, moved = training["loss_means"], training["weights"][-1]
    parts = moved["by_magnitude"]
    audit = ", ".join(f"{finding['code']} ({finding['severity']})" for finding in training["audit"]) or "no finding"
    return (
        f"{title(training)}: after {training['steps']} steps the mean loss of the last {training['loss_window_steps']} is "
        f"{losses[-1]:.2f}, from {losses[0]:.2f} in the first. {moved['changed']:.0%} of the weights have moved: "
        f"{parts['changed_above']:.2%} of those above {parts['threshold']:g}, which are {parts['share_above']:.0%} of all, and "
        f"{parts['changed_below']:.0%} of the others. Audit: {audit}."
    )


def pool(rows: list[EvaluationRow]) -> EvaluationRow:
    """Return the row of all evaluations of a recipe together."""
    solved, episodes = sum(row.solved for row in rows), sum(row.episodes for row in rows)
    low, high = wilson_interval(solved, episodes)
    return replace(
        rows[0],
        name=f"{len(rows)} trainings together",
        training=f"{rows[0].training.rpartition(', seed ')[0]}, all seeds",
        solved=solved,
        episodes=episodes,
        rate=solved / episodes,
        low=low,
        high=high,
        mean_steps="",
        filmed=(),
    )


def loss_curve(training: dict[str, Any]) -> Curve:
    """Return the losses, each in the middle of its window."""
    losses = training["loss_means"]
    return Curve(title(training), [(index + 0.5) * WINDOW for index in range(len(losses))], losses)


def change_curve(training: dict[str, Any]) -> Curve:
    """Return the shares of changed weights in percent."""
    changes = training["weights"]
    shares = [100 * change["changed"] for change in changes]
    return Curve(title(training), [0, *(change["step"] for change in changes)], [0.0, *shares])


def main() -> None:
    """Collect what runs/ has, and render it."""
    if TRAININGS.is_dir():
        collect()
    trainings = read_json(HERE / "trainings.json")["trainings"]
    print(write_evaluation_report(build_report(trainings), HERE, "report"))


if __name__ == "__main__":
    main()
