"""Modules that a rank needs, imported once, before ranks are forked."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from benchbox.worker.device_files import CUDA_DRIVER_FILE, counting_by_files, opened_files

# Libraries that start threads of their own when they are imported, and restart them in a forked child: OpenBLAS, jemalloc.
_THREADED_MODULES = ("numpy", "scipy.special", "pyarrow")

# What DeepSpeed's backends import until the end of a step.
DEEPSPEED_MODULES = (
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    # Imported by every engine; it decorates functions with torch.compile, which imports all of torch._inductor.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.integrations.deepspeed",
    "distutils.ccompiler",
)

# What a rank imports until the end of its first steps, lazy imports of torch and accelerate included.
PRELOADED_MODULES = (
    # Before torch: pydantic searches all modules that are imported for the sources of its models.
    "benchbox.spec",
    "torch",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.utils.data",
    "accelerate",
    "accelerate.utils",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    *DEEPSPEED_MODULES,
    "transformers",
    "av",
    "benchbox.backends.extension",
    "benchbox.backends.deepspeed",
    "benchbox.backends.fsdp1",
    "benchbox.backends.fsdp2",
    "benchbox.backends.replicated",
    "benchbox.worker.measuring",
    "benchbox.worker.rank",
    "benchbox.worker.training",
)


def preload(modules: tuple[str, ...]) -> None:
    """Import modules that ranks need.

    A module that cannot be imported fails again in the rank that needs it, as a typed result.

    Raises:
        AssertionError: importing initialised CUDA or started a thread, which a forked child would not have.
    """
    gc.disable()  # what is imported stays: collections while importing take a sixth of the time, and free nothing
    for module in _THREADED_MODULES:
        _import(module)
    threads = _threads()
    with ExitStack() as substitutes:
        for module in modules:
            _import(module)
            if module == "torch" and module in sys.modules:
                substitutes.enter_context(counting_by_files())
            started = [name for task, name in _threads().items() if task not in threads]
            assert not started, f"threads were started before the fork: {', '.join(started)}, by the import of {module}"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised before the fork"
    assert CUDA_DRIVER_FILE not in opened_files(), "the CUDA driver was opened before the fork"
    assert threading.active_count() == 1, f"threads were started before the fork: {threading.enumerate()}"
    # A garbage collection would visit, and so copy, all that was imported, 0.2 s in every rank.
    gc.collect()
    gc.freeze()
    gc.enable()


def _import(module: str) -> None:
    with suppress(Exception):  # a library that is absent or broken may raise anything
        importlib.import_module(module)


def _threads() -> dict[str, str]:
    """Return the names of the threads of this process by their ids; empty where the system does not tell."""
    names = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            names[task.name] = (task / "comm").read_text().strip()
    return names
