"""DeepSpeed's shared-memory extension, which it compiles on CPU machines at first use."""

from __future__ import annotations

import fcntl
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory


def build_extension() -> None:
    """Build and load it now, one rank after another.

    torch guards a build by a file, and a process killed in the middle leaves that file behind: every later build then waits
    for nobody. The kernel gives this lock back however its holder ends, so whoever has it knows such a file to be stale.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with (folder.parent / f"{builder.name}.building").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)
