"""The sbatch script of a command of benchbox: one task on each node, with the variables that give it its node."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.launch.slurm.options import SlurmOptions

_TEMPLATE = """\
#!/bin/bash
{directives}
# Slurm expands % in a name of an output file, so the output is redirected here.
exec >> {log_prefix}"$SLURM_JOB_ID".log 2>&1
cd -- {folder} || exit

export NNODES="$SLURM_JOB_NUM_NODES"
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"  # two jobs may share a node

# One task on each node starts the ranks of that node. srun asks for one CPU of it unless it is told.
exec srun --kill-on-bad-exit=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
    bash -c 'NODE_RANK="$SLURM_NODEID" exec "$@"' benchbox \\
    {command}{requeued}
"""


def render_script(
    options: SlurmOptions, *, name: str, command: Sequence[str], folder: Path, logs: Path, requeued: str | None = None
) -> str:
    """Return the script of a job.

    Args:
        name: of the matrix or training; characters that could end a line or a word are replaced in the name of the job.
        command: started once on each node.
        folder: working directory of the command.
        logs: folder for the output, `job-<id>.log`.
        requeued: an option that the command gets when Slurm has put the job back into the queue and runs it again.
    """
    safe_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    directives = {"job-name": f"benchbox-{safe_name}", "nodes": str(options.nodes), "ntasks-per-node": "1"}
    directives["output"] = "/dev/null"
    directives |= {key.replace("_", "-"): value for key, value in options.values.items()}
    return _TEMPLATE.format(
        directives="\n".join(f"#SBATCH --{key}={value}".removesuffix("=") for key, value in directives.items()),
        log_prefix=shlex.quote(f"{logs}/job-"),
        folder=shlex.quote(str(folder)),
        command=shlex.join(command),
        requeued=f" ${{SLURM_RESTART_COUNT:+{shlex.quote(requeued)}}}" if requeued else "",
    )
