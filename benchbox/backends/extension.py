"""DeepSpeed's shared-memory extension, which it compiles on CPU machines at first use."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "deepspeed_shm_comm"


def extension_file(root: Path) -> Path:
    """Return the compiled extension below `TORCH_EXTENSIONS_DIR`; it exists once it was compiled."""
    return root / NAME / f"{NAME}.so"


def build_extension(enter_stage: Callable[[str], None] = lambda _: None) -> None:
    """Load the extension, one rank after another. The first rank compiles it, where it was not compiled in this environment.

    torch guards a build with a lock file. A process that is killed during the build leaves the file behind, and every later
    build then waits for ever. The kernel releases `flock` however its holder ends: with it held, such a file is stale.

    Args:
        enter_stage: called when there is something to compile, and when that has ended.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    folder = Path(_get_build_directory(builder.name, verbose=False))
    compiling = not extension_file(folder.parent).exists()
    if compiling:
        enter_stage("compile_extension")
    with (folder.parent / f"{builder.name}.building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)
    if compiling:
        enter_stage("prepare")
