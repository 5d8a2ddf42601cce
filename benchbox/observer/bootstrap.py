"""What a foreign interpreter runs before the program: it waits for torch, then has its optimizer steps observed.

A process that never imports torch pays one function call per import, one that imports it and trains nothing the import of this
package. Nothing that fails here reaches the program: it is written down where the facts would be.
"""

from __future__ import annotations

import os
import sys

# Most processes never import torch: what they need not load is loaded where it is used, `typing` too.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from .observer import StepObserver

# The variables that say which folder to write to, and how many steps to look at.
OUT = "BENCHBOX_OBSERVER_OUT"
STEPS = "BENCHBOX_OBSERVER_STEPS"

_out = os.environ.get(OUT, "")  # read now: a program may clear its environment
_steps = int(os.environ.get(STEPS, "0"))


def start(customisation: str) -> None:
    """Have torch observed as soon as this process imports it, then run the `sitecustomize` that stands behind ours.

    Args:
        customisation: the file of our own `sitecustomize`. Its folder leaves `sys.path`: the program finds it as it would be
            without us, and only the environment leads its children here.
    """
    folder = os.path.dirname(customisation)  # noqa: PTH120 (pathlib is not loaded yet, and most processes never need it)
    sys.path[:] = [each for each in sys.path if each != folder]
    if _out:  # a program may start another with nothing but our path in its environment
        _wait_for_torch()
    _run_shadowed()


def _wait_for_torch() -> None:
    try:
        _leave_mark("python")
        if "torch" in sys.modules:  # a .pth file imported it
            _begin()
        else:
            sys.meta_path.insert(0, _TorchFinder())
    except Exception as problem:  # noqa: BLE001 (the program goes on)
        _confess(problem)


def _run_shadowed() -> None:
    """Debian and Conda ship a `sitecustomize`. What comes of importing it, and if there is none, `site` deals with as ever."""
    del sys.modules["sitecustomize"]  # ours, which is being imported
    __import__("sitecustomize")


class _TorchFinder:
    """Finds torch where everybody finds it, and has its loader call `_begin` when torch is imported completely."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            execute(module)  # what it raises is the program's; a later attempt gets a new loader
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _begin()

        try:
            execute = loader.exec_module
            # On the instance, which is this import's own: whoever asks for torch's loader gets the real one.
            loader.exec_module = exec_module
        except Exception as problem:  # noqa: BLE001
            _confess(problem)


def _begin() -> None:
    try:
        _leave_mark("torch")
        _Record(_steps)
    except Exception as problem:  # noqa: BLE001
        _confess(problem)


class _Record:
    """What the observer of this process saw, as a file. It belongs to the process that stepped first: a child that is forked
    later has the hooks too, and nothing to say.
    """

    def __init__(self, steps: int) -> None:
        import atexit
        import time
        import warnings

        from torch.optim.optimizer import register_optimizer_step_post_hook

        from .observer import StepObserver

        # A compiled model remarks on our global hooks; the program may have made errors of warnings.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._began = time.time()
        self._process: int | None = None
        self._started_in = os.getpid()
        self._done = False
        self._observer = StepObserver(source="command", steps=steps, on_done=self._saw_all)
        self._observer.install()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._at_exit)

    def _stepped(self, *_: Any) -> None:
        """Write in each step that is looked at closely: a rank whose neighbour fails is killed, and can write nothing then."""
        if self._process is None:
            self._process = os.getpid()
        if self._observer.looked_closely:
            self._write()

    def _saw_all(self, _: StepObserver) -> None:
        self._done = True
        self._hook.remove()
        self._write()
        if self._process == os.getpid():
            _leave_mark("through-{}-{}".format(*self._observer.rank))

    def _at_exit(self) -> None:
        if self._process is None and self._started_in == os.getpid() and self._observer.every_step_skipped:
            self._process = os.getpid()
        if self._done or self._process != os.getpid():
            return
        import contextlib

        import torch

        # After an exception a neighbour may be missing from a collective, and reading any tensor of a GPU would wait for it.
        if not (hasattr(sys, "last_type") and torch.cuda.is_initialized()):
            with contextlib.suppress(Exception):
                self._observer.remove()
            self._write()

    def _write(self) -> None:
        if self._process != os.getpid():
            return
        # What tells this group of ranks from others that the command may start.
        job = [os.environ.get(each, "") for each in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
        try:
            _save("facts", {"began": self._began, "job": " ".join(job), "facts": self._observer.facts().to_dict()})
        except Exception as problem:  # noqa: BLE001
            _confess(problem)


def _leave_mark(name: str) -> None:
    """For the case that nothing is seen: how far processes of the command got."""
    os.close(os.open(os.path.join(_out, name), os.O_CREAT | os.O_WRONLY, 0o600))  # noqa: PTH118


def _confess(problem: Exception) -> None:
    import contextlib

    with contextlib.suppress(Exception):  # the folder may be gone: the command has left something running
        _save("problem", {"problem": f"{type(problem).__name__}: {problem}"})


def _save(kind: str, what: dict[str, Any]) -> None:
    """Write this process's file of a kind, whole or not at all."""
    import json
    import socket
    from pathlib import Path

    path = Path(_out, f"{kind}-{socket.gethostname()}-{os.getpid()}.json")
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(what))
    partial.replace(path)
