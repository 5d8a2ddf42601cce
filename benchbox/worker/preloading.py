"""Modules that a rank needs, imported once, before ranks are forked."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from pathlib import Path

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


def preload(modules: tuple[str, ...]) -> dict[str, str]:
    """Import modules that ranks need and return the errors of modules that cannot be imported, by module.

    Such a module fails again in the rank that needs it, as a typed result.

    Raises:
        AssertionError: importing initialised CUDA or started a thread, which a forked child would not have.
    """
    missing: dict[str, str] = {}
    gc.disable()  # what is imported stays: collections while importing take a sixth of the time, and free nothing
    _import_all(_THREADED_MODULES, missing)
    threads = _count_threads()
    _import_all(modules, missing)
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised before the fork"
    assert threading.active_count() == 1, f"threads were started before the fork: {threading.enumerate()}"
    assert _count_threads() == threads, "a library has started a thread before the fork"
    # A garbage collection would visit, and so copy, all that was imported, 0.2 s in every rank.
    gc.collect()
    gc.freeze()
    gc.enable()
    return missing


def _import_all(modules: tuple[str, ...], missing: dict[str, str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 (a library that is absent or broken may raise anything)
            missing[module] = f"{type(error).__name__}: {error}"


def _count_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
