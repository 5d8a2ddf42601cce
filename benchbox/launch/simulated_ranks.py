"""Simulation of a cell: its backend's own code as one of any number of ranks, beside what the formulas say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.errors import UnsupportedError
from benchbox.registry.refusals import cell_refusal
from benchbox.theory.sharding import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from benchbox.spec.cell import Cell
    from benchbox.theory.communication import Traffic
    from benchbox.theory.prediction import Estimate

_CELL_LIMIT_S = 3600.0  # a mean: one cell may take more if others take less


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Collectives of rank 0 in a step, and the bytes of the parameters that it held after `prepare`."""

    collectives: Traffic
    parameter_bytes: int
    tensors: str  # fake or real

    def differences(self, estimate: Estimate) -> list[str]:
        """Return how the formulas differ from this, one line per quantity."""
        lines = []
        for name in sorted(self.collectives.keys() | estimate.collectives.keys()):
            ran, predicted = self.collectives.get(name), estimate.collectives.get(name)
            if ran != predicted:
                lines.append(f"{name} is {ran}, the formula says {predicted}")
        if self.parameter_bytes != estimate.components["parameters"]:
            expected = estimate.components["parameters"]
            lines.append(f"parameters take {self.parameter_bytes} bytes, the formula says {expected}")
        return lines


def simulate_cells(
    cells: Iterable[Cell], policy_dirs: Sequence[Path] = (), *, environment: Mapping[str, str]
) -> Mapping[str, Simulation | UnsupportedError]:
    """Run `prepare` and a step of each backend as rank 0 of `cell.world_size`, each in a process without other ranks.

    The processes are forked from one that has only imported, so that nothing of a cell reaches the next.

    Args:
        cells: of any number of ranks.
        policy_dirs: folders in which their policies are searched for.
        environment: all variables of those processes. DeepSpeed compiles its extension in a process in which
            TORCH_EXTENSIONS_DIR is not that of the ranks.

    Returns:
        By cell id, the simulation, or the error that says why the backend, or this policy with it, cannot be simulated.
    """
    cells = list(cells)
    simulations = {cell.cell_id: UnsupportedError(reason) for cell in cells if (reason := _refusal(cell))}
    cells = [cell for cell in cells if cell.cell_id not in simulations]
    if not cells:
        return simulations
    request = {"cells": [cell.to_dict() for cell in cells], "policy_dirs": [str(folder.resolve()) for folder in policy_dirs]}
    command = [sys.executable, "-m", "benchbox.worker.simulated_ranks"]
    limit_s = _CELL_LIMIT_S * len(cells)
    try:
        result = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, env=environment, check=False, timeout=limit_s
        )
        output, code, errors = result.stdout, result.returncode, result.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        output, code, errors = error.stdout or b"", 1, f"it has not ended within {limit_s:g} s"
    answers = [json.loads(line) for line in output[: output.rfind(b"\n") + 1].splitlines()]
    # Those without an answer share the end of the process that forks.
    answers += [{"code": code, "output": "", "errors": errors}] * (len(cells) - len(answers))
    return simulations | {cell.cell_id: _simulation(cell, **answer) for cell, answer in zip(cells, answers, strict=True)}


def _refusal(cell: Cell) -> str | None:
    """Return why a cell is not tried, if so."""
    if cell.backend == "single":
        return "backend single is not simulated: it has no collectives"
    if cell.backend not in MODELS:
        return f"backend {cell.backend} is not simulated: there is no formula to compare with"
    if cell.compile != "off":
        return "compiled graphs are not simulated"
    return cell_refusal(cell)


def _simulation(cell: Cell, code: int, output: str, errors: str) -> Simulation | UnsupportedError:
    """Return what the process of a cell found, or its last words as an error."""
    if code or not output:
        reason = (errors.strip().splitlines() or [f"exit code {code}"])[-1].removeprefix("[rank0]: ")
        return UnsupportedError(f"the step of {cell.policy} on {cell.backend} cannot be simulated: {reason:.200}")
    return Simulation(**json.loads(output.splitlines()[-1]))
