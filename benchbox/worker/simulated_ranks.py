"""Simulated ranks of several cells, each forked from one process that has only imported.

`python -m benchbox.worker.simulated_ranks` reads {cells, policy_dirs} from its input and prints a line of JSON for each cell
as soon as it has ended: what its process wrote, and its exit code. The imports take seconds, a step of a small policy does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from benchbox.registry.backends import backend_info
from benchbox.spec.cell import Cell
from benchbox.worker.forked_group import run_forked
from benchbox.worker.parent import signal_on_parent_death
from benchbox.worker.preloading import DEEPSPEED_MODULES, preload

if TYPE_CHECKING:
    from collections.abc import Sequence

# What all backends import until the end of a step.
_MODULES = (
    "benchbox.spec",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.data",
    "accelerate",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "av",
    "benchbox.estimation.simulated_rank",
)


def main() -> None:
    """Import, then simulate one cell after the other, each in a process of its own."""
    signal_on_parent_death(signal.SIGKILL)
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's logger writes to the output when it is imported
    cells = [Cell.from_dict(entry) for entry in request["cells"]]
    policy_dirs = [Path(folder) for folder in request["policy_dirs"]]
    os.environ.update(RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", CUDA_VISIBLE_DEVICES="")
    backends = tuple(sorted({backend_info(cell.backend).target.partition(":")[0] for cell in cells}))
    preload(_MODULES + (DEEPSPEED_MODULES if any(cell.backend.startswith("zero") for cell in cells) else ()) + backends)
    for cell in cells:
        print(json.dumps(_simulate(cell, policy_dirs)), file=answers, flush=True)


def _simulate(cell: Cell, policy_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the exit code of the process of a cell, and what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            run_forked(lambda: _simulate_forked(cell, policy_dirs, output, errors))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return {"code": code, "output": _read(output), "errors": _read(errors)}


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _simulate_forked(cell: Cell, policy_dirs: Sequence[Path], output: BinaryIO, errors: BinaryIO) -> None:
    signal_on_parent_death(signal.SIGKILL)
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    os.environ.update(WORLD_SIZE=str(cell.world_size), LOCAL_WORLD_SIZE=str(cell.world_size))
    from benchbox.estimation.simulated_rank import simulate_rank  # an error of its imports is one of the cell

    print(json.dumps(simulate_rank(cell, policy_dirs)))


if __name__ == "__main__":
    main()
