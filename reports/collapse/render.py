"""Write this folder from runs/: trainings.json, the records of the evaluations, report.html and report.md.

Run it in the root of the repository, after the commands of docs/evaluation.md: python reports/collapse/render.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchbox.report.evaluation import build_evaluation_report, write_evaluation_report
from benchbox.report.evaluation_charts import TrainingCurve, draw_training_curves
from benchbox.store.files import read_json, write_json
from benchbox.trainer.checkpoint import load_policy

HERE = Path(__file__).parent
TRAININGS, EVALUATIONS = Path("runs/train"), Path("runs/evaluations")
UNTRAINED = "untrained"
WINDOW = 50  # steps whose losses are averaged
TITLE = "bfloat16 without masters: loss, weights and closed loop on a task of Meta-World"


def collect_training(folder: Path) -> dict[str, Any]:
    """Return the course of a training: mean losses by window of steps, and shares of changed weights by checkpoint."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    windows = [losses[start : start + WINDOW] for start in range(0, len(losses) - WINDOW + 1, WINDOW)]
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    cell = read_json(checkpoints[-1] / "checkpoint.json")["cell"]
    # The untrained policy of the same seed: its one step has a learning rate of 2.5e-7.
    starts = [*(TRAININGS / UNTRAINED / "checkpoints").glob("step-*")] if cell["seed"] == 0 else []
    first = load_weights(starts[0]) if starts else None
    before, changes = first, []
    for checkpoint in checkpoints:
        weights = load_weights(checkpoint)
        changes.append(
            {
                "step": int(checkpoint.name.removeprefix("step-")),
                "changed_since_last": None if before is None else share_changed(before, weights),
                "changed_since_start": None if first is None else share_changed(first, weights),
                "by_magnitude": None if first is None else by_magnitude(first, weights, cell["optim"]["lr"]),
            }
        )
        before = weights
    return {
        "name": folder.name,
        "recipe": cell["recipe"],
        "lr": cell["optim"]["lr"],
        "seed": cell["seed"],
        "batch": cell["batch"],
        "steps": len(losses),
        "loss_window_steps": WINDOW,
        "loss_means": [round(sum(window) / WINDOW, 4) for window in windows],
        "weights": changes,
    }


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in bfloat16, as the policy computes with them."""
    policy = load_policy(checkpoint)
    assert isinstance(policy, torch.nn.Module)
    return {name: parameter.detach().bfloat16() for name, parameter in policy.named_parameters()}


def share_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the share of the elements that differ between two checkpoints."""
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    return round(changed / sum(tensor.numel() for tensor in after.values()), 4)


def by_magnitude(start: dict[str, torch.Tensor], after: dict[str, torch.Tensor], lr: float) -> dict[str, float]:
    """Return the shares of changed weights below and above 512 lr, where an update of lr is half the distance of numbers."""
    threshold = 512 * lr
    magnitude = torch.cat([tensor.float().abs().flatten() for tensor in start.values()])
    changed = torch.cat([(after[name] != start[name]).flatten() for name in start])
    above = magnitude > threshold
    return {
        "threshold": round(threshold, 6),
        "share_above": round(float(above.float().mean()), 4),
        "changed_above": round(float(changed[above].float().mean()), 6),
        "changed_below": round(float(changed[~above].float().mean()), 4),
    }


def main() -> None:
    """Collect what runs/ has, and render it."""
    if TRAININGS.is_dir():
        folders = sorted(path for path in TRAININGS.glob("lr*") if list(path.glob("checkpoints/step-*")))
        write_json(HERE / "trainings.json", {"trainings": [collect_training(folder) for folder in folders]})
        for folder in sorted(EVALUATIONS.iterdir()):
            copy = HERE / "evaluations" / folder.name
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.html", "*.md"))
    trainings = read_json(HERE / "trainings.json")["trainings"]
    report = build_evaluation_report(
        sorted((HERE / "evaluations").iterdir(), key=lambda path: (path.name != UNTRAINED, path.name))
    )
    report = replace(
        report,
        title=TITLE,
        paragraphs=tuple((HERE / "findings.txt").read_text(encoding="utf-8").strip().splitlines()),
        charts=(
            draw_training_curves(
                "loss", "Loss by step", f"Flow matching loss, mean of {WINDOW} steps.", tuple(loss_curve(t) for t in trainings)
            ),
            draw_training_curves(
                "changed",
                "Changed weights by step",
                "Share of the bfloat16 weights that differ from the checkpoint 500 steps before, in %.",
                tuple(change_curve(t) for t in trainings if t["weights"][0]["changed_since_last"] is not None),
            ),
        ),
    )
    print(write_evaluation_report(report, HERE, "report"))


def title(training: dict[str, Any]) -> str:
    """Return the name of a training in a legend."""
    return f"{training['recipe']}, lr {training['lr']:g}, seed {training['seed']}"


def loss_curve(training: dict[str, Any]) -> TrainingCurve:
    """Return the losses, each in the middle of its window."""
    points = tuple(((index + 0.5) * WINDOW, loss) for index, loss in enumerate(training["loss_means"]))
    return TrainingCurve(name=title(training), points=points)


def change_curve(training: dict[str, Any]) -> TrainingCurve:
    """Return the shares of changed weights in percent."""
    points = tuple((change["step"], 100 * change["changed_since_last"]) for change in training["weights"])
    return TrainingCurve(name=title(training), points=points)


if __name__ == "__main__":
    main()
