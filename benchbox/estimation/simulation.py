"""Simulation of a cell: its backend's own code as one of any number of ranks, beside what the formulas say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.errors import UnsupportedError
from benchbox.registry.backends import backend_info
from benchbox.theory.sharding import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.spec.cell import Cell
    from benchbox.theory.communication import Traffic
    from benchbox.theory.prediction import Estimate


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


def simulate(cell: Cell, policy_dirs: Sequence[Path] = (), environment: Mapping[str, str] | None = None) -> Simulation:
    """Run `prepare` and a step of the backend as rank 0 of `cell.world_size`, in a process without other ranks.

    Args:
        cell: of any number of ranks.
        policy_dirs: folders in which its policy is searched for.
        environment: all variables of that process, those of this one by default. DeepSpeed compiles its extension in a process
            in which TORCH_EXTENSIONS_DIR is not that of the ranks.

    Raises:
        UnsupportedError: the backend, or this policy with it, cannot be simulated; the message says why.
    """
    if cell.backend == "single" or cell.backend not in MODELS:
        raise UnsupportedError(f"backend {cell.backend} is not simulated: there is no formula to compare with")
    if cell.compile != "off":
        raise UnsupportedError("compiled graphs are not simulated")
    if refusal := backend_info(cell.backend).refusal(cell):
        raise UnsupportedError(refusal)
    request = {"cell": cell.to_dict(), "policy_dirs": [str(folder.resolve()) for folder in policy_dirs]}
    command = [sys.executable, "-m", "benchbox.estimation.simulated_rank"]
    variables = dict(os.environ if environment is None else environment)
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=variables, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1].removeprefix("[rank0]: ")
        raise UnsupportedError(f"the step of {cell.policy} on {cell.backend} cannot be simulated: {reason:.200}")
    return Simulation(**json.loads(result.stdout.splitlines()[-1]))
