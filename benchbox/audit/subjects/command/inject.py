"""Inject the observer into every Python that a command starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import benchbox.observer
from benchbox.observer.bootstrap import OUT, STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

# The copy of the observer has its own package name: the command's Python may have another version of benchbox installed.
_SITECUSTOMIZE = '''\
"""Put here by `benchbox audit-precision`: observes the first optimizer steps of this process, if it takes any."""

from benchbox_observer.bootstrap import start

start(__file__)
'''


def inject(folder: Path, steps: int, user: Mapping[str, str]) -> dict[str, str]:
    """Fill a new folder with the observer and a `sitecustomize` that starts it.

    Python imports `sitecustomize` before it runs any program, and finds this one first through `PYTHONPATH`. The environment of
    the command is not modified, and need not have benchbox.

    Args:
        folder: to be created. The processes of the command write their reports to `reports_folder(folder)`.
        steps: number of optimizer steps to observe in each process.
        user: environment variables that the command would have had.

    Returns:
        the variables to add to the environment of the command.
    """
    injected = folder / "path"
    source = Path(benchbox.observer.__file__).parent
    shutil.copytree(source, injected / "benchbox_observer", ignore=shutil.ignore_patterns("__pycache__"))
    (injected / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    reports_folder(folder).mkdir()
    path = [str(injected), *filter(None, [user.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), OUT: str(reports_folder(folder)), STEPS: str(steps)}


def reports_folder(folder: Path) -> Path:
    """Return the folder that the processes of a command write their reports to, given the injected folder."""
    return folder / "seen"
