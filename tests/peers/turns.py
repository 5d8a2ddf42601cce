"""Turns of a side, the same on both: a first step, then as many as each line of standard input says.

Needs torch and `benchbox.measure` only, so that it runs in lerobot's environment too.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import IO, TYPE_CHECKING, Any

import torch

from benchbox.measure.memory import peak_memory, release_cached_memory, reset_peak_memory
from benchbox.measure.phases import NONE, Instrument, PhaseClock

if TYPE_CHECKING:
    from collections.abc import Callable

LEARNING_RATE = 1e-4
TRIES, WAIT_S = 4, 5.0  # of the first step, where another process takes the memory for a while


def answer_turns(
    step: Callable[[Instrument], torch.Tensor],
    discard: Callable[[], None],
    device: torch.device,
    optim: dict[str, Any],
    answers: IO[str],
) -> None:
    """Take a first step, answer with its loss, then take the steps that are asked for until standard input ends.

    On a GPU every turn begins with a step that is not timed, because other processes have used the memory since the last turn.

    Args:
        step: takes a step under an instrument and returns its loss.
        discard: drops the gradients of a step that was not completed.
        device: of the weights.
        optim: hyperparameters of the optimizer, as it has them.
        answers: stream of the answers.
    """
    release_cached_memory(device)
    loss = _take_first_step(step, discard, device)
    release_cached_memory(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    libraries = {"torch": torch.__version__, "transformers": version("transformers")}
    _write({**libraries, "device": name, "losses": [loss], "optim": optim}, answers)
    clock = PhaseClock(device)
    for line in sys.stdin:
        if device.type == "cuda":
            step(NONE)
            reset_peak_memory(device)
        losses = [step(clock) for _ in range(int(line))]
        times = clock.drain()
        record = {"step_s": times.step_s, "phases_s": times.phases_s, "losses": [float(loss) for loss in losses]}
        memory = peak_memory(device)
        if memory is not None:
            record["cuda_bytes"] = memory["allocated_peak_bytes"]
        del losses
        release_cached_memory(device)
        _write(record, answers)


def optim_in_force(groups: list[dict[str, Any]], max_grad_norm: float) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer, which are the same in all its groups."""
    sets = [
        [float(group["lr"]), *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])] for group in groups
    ]
    assert all(values == sets[0] for values in sets)
    return dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), sets[0], strict=True)) | {"max_grad_norm": max_grad_norm}


def _take_first_step(step: Callable[[Instrument], torch.Tensor], discard: Callable[[], None], device: torch.device) -> float:
    """Return the loss of the first step, repeated if memory is short: processes that start together compile in parallel."""
    for number in range(1, TRIES + 1):
        try:
            return float(step(NONE))
        except torch.OutOfMemoryError:
            if number == TRIES:
                raise
            discard()
        release_cached_memory(device)
        time.sleep(WAIT_S)
    raise AssertionError


def _write(record: dict[str, Any], answers: IO[str]) -> None:
    print(json.dumps(record), file=answers, flush=True)
