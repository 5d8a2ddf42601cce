"""Matrices of random cells: `python -m tests.support.random_matrices SEED COUNT > matrix.yaml`, and then `benchbox run` of it.

Axes meet here in ways that nobody has thought of. Such cells have shown what accumulated gradients take under DDP, and what a
stream of batches kept in memory.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import yaml

from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.registry.policies import find_policies
from benchbox.registry.recipes import recipes

AXES: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 3),
    "cams": (1, 2, 3, 4),
    "attention": ("eager", "sdpa"),
    "checkpointing": (False, True),
    "padding": ("full", "full", "longest"),
    "freeze": ("full", "full", "freeze_vision"),
    "accumulation": (1, 2, 3),
    "order": ("frame_shuffle", "episode_shuffle", "sequential"),
    "seed": (0, 1),
}


def random_matrix(seed: int, count: int) -> dict[str, Any]:
    """Return a matrix of `count` points, the same for the same seed."""
    draw = random.Random(seed)
    policies, backends, precisions = sorted(find_policies()), sorted(BUILT_IN_BACKENDS), sorted(recipes())
    points = []
    for _ in range(count):
        backend = draw.choice(backends)
        ranks = 1 if backend == "single" else 4 if "hybrid" in backend or backend == "hsdp" else 2
        names = {"policy": draw.choice(policies), "backend": backend, "world_size": ranks, "recipe": draw.choice(precisions)}
        points.append(names | {field: draw.choice(values) for field, values in AXES.items()})
    optim = {
        **draw.choice(({}, {"ema_decay": 0.9})),
        **draw.choice(({}, {"spike": {"max": 3.0}})),
        **draw.choice(({}, {"freeze_backbone_steps": draw.randint(1, 4)})),
    }
    measure = {"warmup_steps": 2, "steps": 3, "launches": 1}
    matrix = {"name": f"random_{seed}", "size": "tiny", "data": "sample", "optim": optim}
    return matrix | {"axes": {"points": points}, "measure": measure}


if __name__ == "__main__":
    yaml.safe_dump(random_matrix(*map(int, sys.argv[1:])), sys.stdout, sort_keys=False)
