"""Start of the observer in a foreign interpreter: wait for the program to import torch, then observe its optimizer steps.

A process that never imports torch pays one function call per import; one that imports torch and trains nothing pays the import
of this package. No failure here reaches the program: it is written to a file beside the facts.
"""

from __future__ import annotations

import os
import sys

# Most processes never import torch. Everything else, `typing` included, is imported where it is used.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from .observer import StepObserver

# Environment variables with the output folder and the number of steps to observe.
OUT = "BENCHBOX_OBSERVER_OUT"
STEPS = "BENCHBOX_OBSERVER_STEPS"

_out = os.environ.get(OUT, "")  # read at import: a program may clear its environment
_steps = int(os.environ.get(STEPS, "0"))


def start(sitecustomize: str) -> None:
    """Observe this process once it has imported torch, then run the `sitecustomize` that ours shadows.

    Args:
        sitecustomize: the path of our own `sitecustomize` module. Its folder is removed from `sys.path`, so that the program
            finds the path it would have without us. Only the environment leads child processes here.
    """
    folder = os.path.dirname(sitecustomize)  # noqa: PTH120 (pathlib is not imported yet, and most processes never need it)
    sys.path[:] = [path for path in sys.path if path != folder]
    if _out:  # a program may start another with nothing but our path in its environment
        _wait_for_torch()
    _run_shadowed_sitecustomize()


def _wait_for_torch() -> None:
    try:
        _touch("python")
        if "torch" in sys.modules:  # a .pth file imported it
            _observe()
        else:
            sys.meta_path.insert(0, _TorchFinder())
    except Exception as problem:  # noqa: BLE001 (the program continues)
        _write_problem(problem)


def _run_shadowed_sitecustomize() -> None:
    """Import the `sitecustomize` that Debian and Conda ship. `site` handles its exceptions, ModuleNotFoundError included."""
    del sys.modules["sitecustomize"]  # ours, which is being imported
    __import__("sitecustomize")


class _TorchFinder:
    """Finds torch through the other finders, and has its loader call `_observe` once torch is completely imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap_loader(spec.loader)
                return spec
        return None

    def _wrap_loader(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            original(module)  # its exceptions are the program's; a later attempt gets a new loader
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _observe()

        try:
            original = loader.exec_module
            # Set on the instance, which belongs to this import: other users of torch's loader class are not affected.
            loader.exec_module = exec_module
        except Exception as problem:  # noqa: BLE001
            _write_problem(problem)


def _observe() -> None:
    try:
        _touch("torch")
        _FactsWriter(_steps)
    except Exception as problem:  # noqa: BLE001
        _write_problem(problem)


class _FactsWriter:
    """Observes this process and writes the facts to a file.

    The file belongs to the process that stepped first. A process forked later inherits the hooks, but writes nothing.
    """

    def __init__(self, steps: int) -> None:
        import atexit
        import time
        import warnings

        from .observer import StepObserver

        # A compiled model warns about our global hooks, and the program may turn warnings into errors.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._began = time.time()
        self._process: int | None = None
        self._started_in = os.getpid()
        self._done = False
        self._step = self._calls = self._written_calls = 0  # the latest probed step, and its calls of optimizers
        self._observer = StepObserver(source="command", steps=steps, on_call=self._after_call, on_done=self._on_done)
        self._observer.install()
        atexit.register(self._at_exit)

    def _after_call(self, observer: StepObserver) -> None:
        """Write after each probed step: a rank whose neighbour fails is killed and cannot write at exit.

        One step may be hundreds of calls of optimizers, and which is its last is known only when the next step begins. Facts
        are written after the first, the second, the fourth call and so on, and at the beginning of the next step.
        """
        if self._process is None:
            self._process = os.getpid()
        if observer.probed_latest_step:
            if self._step != observer.steps_observed:
                self._step, self._calls, self._written_calls = observer.steps_observed, 0, 0
            self._calls += 1
            if self._calls >= 2 * self._written_calls:
                self._written_calls = self._calls
                self._write()
        elif self._calls > self._written_calls:
            self._written_calls = self._calls
            self._write()

    def _on_done(self, observer: StepObserver) -> None:
        self._done = True
        self._write()
        if self._process == os.getpid():
            rank, world_size = observer.rank
            _touch(f"through-{rank}-{world_size}-{_local_world_size(world_size)}")

    def _at_exit(self) -> None:
        observer = self._observer
        unseen = observer.every_step_skipped or observer.unobserved or observer.has_failed
        if self._process is None and self._started_in == os.getpid() and unseen:
            self._process = os.getpid()
        if self._done or self._process != os.getpid():
            return
        import contextlib

        import torch

        # After an exception a neighbour may be missing from a collective, and reading any CUDA tensor would wait for it.
        if not (hasattr(sys, "last_type") and torch.cuda.is_initialized()):
            with contextlib.suppress(Exception):
                self._observer.remove()
            self._write()

    def _write(self) -> None:
        if self._process != os.getpid():
            return
        # These variables distinguish this group of ranks from others that the command may start.
        job = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
        try:
            _write_json("facts", {"began": self._began, "job": " ".join(job), "facts": self._observer.facts().to_dict()})
        except Exception as problem:  # noqa: BLE001
            _write_problem(problem)


def _local_world_size(world_size: int) -> int:
    """Return the number of ranks on this machine: torchrun's and accelerate's variable, or DeepSpeed's; all, without either."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return min(int(local), world_size) if local.isdecimal() and int(local) else world_size


def _touch(name: str) -> None:
    """Create an empty file in the output folder. It shows how far a process got if there are no facts."""
    os.close(os.open(os.path.join(_out, name), os.O_CREAT | os.O_WRONLY, 0o600))  # noqa: PTH118


def _write_problem(problem: Exception) -> None:
    import contextlib

    with contextlib.suppress(Exception):  # the folder may be gone if the command left a process running
        _write_json("problem", {"problem": f"{type(problem).__name__}: {problem}"})


def _write_json(kind: str, content: dict[str, Any]) -> None:
    """Write this process's file of a kind atomically."""
    import json
    import socket
    from pathlib import Path

    path = Path(_out, f"{kind}-{socket.gethostname()}-{os.getpid()}.json")
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(path)
