"""Putting the witness into every Python that a command starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import benchbox.observer
from benchbox.observer.bootstrap import OUT, STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

# The witness goes by a name of its own: where benchbox is installed it is another copy, maybe of another version.
_CUSTOMISATION = '''\
"""Put here by `benchbox audit-precision`: looks at the first optimizer steps of this process, if it takes any."""

from benchbox_observer.bootstrap import start

start(__file__)
'''


def inject(folder: Path, steps: int, user: Mapping[str, str]) -> dict[str, str]:
    """Fill a new folder with the witness and a `sitecustomize` that starts it.

    Python runs `sitecustomize` before any program, and finds ours first by `PYTHONPATH`. Nothing of the environment that the
    command runs in is touched, and it need not have benchbox.

    Args:
        folder: to be made. What the processes of the command see is written to `seen(folder)`.
        steps: how many optimizer steps each process is to look at.
        user: the environment that the command would have had.

    Returns:
        the variables that the command is to be started with besides.
    """
    injected = folder / "path"
    source = Path(benchbox.observer.__file__).parent
    shutil.copytree(source, injected / "benchbox_observer", ignore=shutil.ignore_patterns("__pycache__"))
    (injected / "sitecustomize.py").write_text(_CUSTOMISATION)
    reports_folder(folder).mkdir()
    path = [str(injected), *filter(None, [user.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), OUT: str(reports_folder(folder)), STEPS: str(steps)}


def reports_folder(folder: Path) -> Path:
    """Where the processes of a command leave what they saw, given the folder that was injected."""
    return folder / "seen"
