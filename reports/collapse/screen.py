"""Write screening.json: how often actions that take no learning solve tasks of Meta-World.

Needs the extra `sim`. Run it in the root of the repository with names of tasks: python reports/collapse/screen.py door-open-v3
Of each task it takes 12 demonstrations of the scripted expert, and tries in other episodes: the mean action of the
demonstrations; normal noise of their mean and spread; their mean action of each frame, whatever is seen; and the next 10
actions after the state of the demonstrations that is nearest to the hand, again and again.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.writing.simulator import GOALS_PER_SEED, Simulator
from benchbox.simulation.metaworld import GOAL_SEED
from benchbox.store.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Path(__file__).parent / "screening.json"
EVERY, DEMONSTRATIONS, EPISODES, CHUNK = 4, 12, 30, 10


def screen(name: str) -> dict[str, object]:
    """Return the numbers of solved episodes of a task by how actions are chosen."""
    simulator = Simulator(name, (), 64, EVERY, 0)
    states, actions, number = [], [], 0
    while len(actions) < DEMONSTRATIONS:
        seen, done = demonstrate(simulator, number)
        number += 1
        if seen is not None:
            states.append(seen)
            actions.append(done)
    all_actions, spread = np.concatenate(actions), np.concatenate(states).std(axis=0) + 1e-3
    mean, deviation = all_actions.mean(axis=0), all_actions.std(axis=0)
    longest = max(map(len, actions))
    by_frame = np.array([np.mean([row[min(i, len(row) - 1)] for row in actions], axis=0) for i in range(longest)])
    random = np.random.default_rng(0)
    plan: list[np.ndarray] = []

    def nearest(frame: int) -> np.ndarray:
        if frame % CHUNK == 0:
            state = simulator.observe()["observation.state"]
            distances = [(float((((row - state) / spread) ** 2).sum(axis=1).min()), i) for i, row in enumerate(states)]
            best = min(distances)[1]
            start = int((((states[best] - state) / spread) ** 2).sum(axis=1).argmin())
            rows = actions[best]
            plan[:] = [rows[min(start + i, len(rows) - 1)] for i in range(CHUNK)]
        return plan[frame % CHUNK]

    choices: dict[str, Callable[[int], np.ndarray]] = {
        "mean_action": lambda _: mean,
        "noise": lambda _: mean + deviation * random.standard_normal(4),
        "mean_of_frame": lambda frame: by_frame[min(frame, longest - 1)],
        "nearest_state": nearest,
    }
    limit = longest * 5 // 2
    solved = {
        choice: sum(act(simulator, GOALS_PER_SEED * GOAL_SEED + episode, choose, limit) for episode in range(EPISODES))
        for choice, choose in choices.items()
    }
    lengths = [len(rows) for rows in actions]
    return {
        "env": f"metaworld/{name}",
        "attempts": number,
        "mean_frames": round(float(np.mean(lengths)), 1),
        "max_steps": limit,
        "episodes": EPISODES,
        "solved": solved,
    }


def demonstrate(simulator: Simulator, number: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the states (T, 4) and actions (T, 4) of the expert in an episode; no states if it did not solve the task."""
    simulator.reset(number)
    states, actions, solved, over = [], [], False, False
    while not (solved or over):
        action = np.clip(simulator._expert.get_action(simulator._observation), -1, 1).astype(np.float32)  # noqa: SLF001
        states.append(simulator.observe()["observation.state"].copy())
        actions.append(action)
        solved, over = simulator.step(action)
    return np.array(states) if solved else None, np.array(actions)


def act(simulator: Simulator, number: int, choose: Callable[[int], np.ndarray], limit: int) -> bool:
    """Return whether chosen actions solve an episode within `limit` actions."""
    simulator.reset(number)
    for frame in range(limit):
        solved, over = simulator.step(np.clip(choose(frame), -1, 1).astype(np.float32))
        if solved or over:
            return solved
    return False


def main() -> None:
    """Screen the tasks that are named, and add them to the file."""
    warnings.simplefilter("ignore")  # experts exceed the action range; actions are clipped
    rows = {row["env"]: row for row in (read_json(OUT)["tasks"] if OUT.is_file() else [])}
    for name in sys.argv[1:]:
        row = screen(name)
        rows[row["env"]] = row
        print(row)
        write_json(OUT, {"demonstrations": DEMONSTRATIONS, "tasks": sorted(rows.values(), key=lambda row: row["env"])})


if __name__ == "__main__":
    main()
