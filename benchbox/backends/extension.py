"""DeepSpeed's shared-memory extension, which it compiles on CPU machines at first use."""

from __future__ import annotations

import fcntl
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory


def build_extension() -> None:
    """Build and load the extension, one rank after another.

    torch guards a build with a lock file. A process that is killed during the build leaves the file behind, and every later
    build then waits for ever. The kernel releases `flock` however its holder ends: with it held, such a file is stale.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with (folder.parent / f"{builder.name}.building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)
