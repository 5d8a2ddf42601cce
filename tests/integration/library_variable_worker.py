"""The worker with a library that sets a variable when the policy is built, as parts of Inductor do at their import.

It begins with another variable, as if the shell had it. All else is unchanged, so that the shared fork server can start it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchbox.worker import measuring
from benchbox.worker.rank import run_rank

build_cell_policy = measuring.build_cell_policy


def build_with_library(*args: Any) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return build_cell_policy(*args)


if __name__ == "__main__":
    os.environ["OMP_PROC_BIND"] = "false"
    measuring.build_cell_policy = build_with_library
    run_rank(sys.argv[1])
