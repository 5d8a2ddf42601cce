"""Random trainings, each with a step to stop after and a set-up to move to: `python -m tests.support.random_trainings SEED DIR`
writes the training file, and the datasets that it names.

Options meet here in ways that nobody has thought of. `tests/integration/test_random_trainings.py` says what holds for them all.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.registry.policies import find_policies
from benchbox.registry.recipes import recipes
from tests.support.datasets import annotate, write_robot

LENGTHS = (9, 5, 14, 3, 11)
RANKS = {"single": (1,), "ddp": (2, 4)}  # DDP rounds otherwise over more than two
TEXTS = ("response", "memory", "metadata.speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTraining:
    """A training file, the step after which the training is stopped, and what of the file changes when it moves."""

    file: dict[str, Any]
    stop: int
    move: dict[str, Any]


def write_datasets(folder: Path) -> list[Path]:
    """Write a robot with two cameras and, in every other frame, texts to learn, and one of other sizes."""
    plain = write_robot(folder / "plain", cameras={"top": (16, 16), "side": (16, 24)}, lengths=LENGTHS, level=90)
    columns = {name: [f"{name} {frame}" if frame % 2 else "" for frame in range(sum(LENGTHS))] for name in TEXTS}
    texts = annotate(plain, folder / "texts", columns)
    return [texts, write_robot(folder / "other", cameras={"top": (16, 16)}, lengths=(6, 8, 2, 7), state=2, action=4, scale=0.3)]


def random_training(seed: int, datasets: list[Path]) -> RandomTraining:
    """Return a training of a few steps, the same for the same seed. A step has 4 samples on any backend."""
    draw = random.Random(seed)
    recipe = draw.choice(sorted(recipes()))
    steps = draw.randint(4, 8)
    data = _data(draw, datasets)
    file = _ranks(draw, recipe) | {
        "name": f"random_{seed}",
        "policy": draw.choice(sorted(find_policies())),
        "size": "tiny",
        "recipe": recipe,
        "seed": draw.choice((0, 1)),
        "cams": draw.choice((1, 2, 3)),
        "order": draw.choice(("frame_shuffle", "episode_shuffle", "sequential")),
        "padding": draw.choice(("full", "full", "longest")),
        "freeze": draw.choice(("full", "full", "freeze_vision")),
        "data": data,
        "optim": _optim(draw, steps),
        "steps": steps,
        "log_every": draw.choice((1, 2, 10)),
        "checkpoint": {"every": draw.choice((1, 2, 3)), "keep": 20, "background": draw.choice((False, True))},
    }
    if "validation" in data:
        weights = draw.choice(("trained", "averages")) if "ema_decay" in file["optim"] else "trained"
        file["validation"] = {"every": draw.choice((1, 2, 3)), "at_start": draw.choice((False, True)), "weights": weights}
    return RandomTraining(file=file, stop=draw.randint(1, steps - 1), move=_ranks(draw, recipe))


def _ranks(draw: random.Random, recipe: str) -> dict[str, Any]:
    backend = draw.choice([name for name, info in BUILT_IN_BACKENDS.items() if recipe in info.recipes])
    ranks = draw.choice(RANKS.get(backend, (4,) if BUILT_IN_BACKENDS[backend].hybrid else (2,)))
    accumulation = draw.choice([number for number in (1, 2, 4) if number * ranks <= 4])
    return {"backend": backend, "world_size": ranks, "batch": 4 // ranks // accumulation, "accumulation": accumulation}


def _data(draw: random.Random, datasets: list[Path]) -> dict[str, Any]:
    weights = draw.choice((None, (3.0, 1.0), (2.0, 7.0)))
    entries: list[dict[str, Any]] = [{"lerobot": str(path)} for path in datasets]
    if weights is not None:
        entries = [entry | {"weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    data: dict[str, Any] = draw.choice(({"lerobot": str(datasets[0])}, {"mixture": entries}))
    options = {"workers": draw.choice((0, 1, 2)), "block": draw.choice((3, 16)), "buffer": draw.choice((7, 64))}
    return data | options | draw.choice(({}, {"validation": 0.3}))


def _optim(draw: random.Random, steps: int) -> dict[str, Any]:
    """Everything of a step that has state: a schedule that ends before or after the training, thawing, averages, spikes."""
    optim: dict[str, Any] = {
        "lr": draw.choice((1e-3, 3e-4)),
        "schedule": draw.choice(("constant", "warmup_constant", "warmup_cosine", "wsd")),
        "warmup_steps": draw.choice((0, 1)),
        "total_steps": draw.randint(steps - 1, steps + 3),
        "final_lr": 1e-5,
        "max_grad_norm": draw.choice((0.05, 1.0, 1e3)),
    }
    return optim | {
        **draw.choice(({}, {"ema_decay": 0.9}, {"ema_decay": 0.9, "ema_warmup": True})),
        **draw.choice(({}, {"freeze_backbone_steps": draw.randint(1, steps), "thaw_warmup_steps": 2})),
        **draw.choice(({}, {"groups": [{"match": "*weight", "lr": 5e-4, "betas": [0.8, 0.9]}]})),
        **draw.choice(({}, {}, {"spike": {"factor": 1.02, "window": 2}}, {"spike": {"max": 3.0}})),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    training = random_training(int(sys.argv[1]), write_datasets(folder))
    (folder / "train.yaml").write_text(yaml.safe_dump(training.file, sort_keys=False))
    print(f"stop after step {training.stop}; move to {training.move}")
