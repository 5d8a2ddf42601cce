"""Checkpoints on disk: how their folders are named, and what they say they are."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.store.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

_PREFIX = "step-"
_ABOUT = "checkpoint.json"


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """Optimizer steps that went into it."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def name_of(steps: int) -> str:
    return f"{_PREFIX}{steps:08d}"


def describe_in(folder: Path, cell: Cell, steps: int) -> None:
    """Write into a checkpoint what it is."""
    about = {"schema_version": 1, "steps": steps, "cell": cell.to_dict(), "benchbox_version": __version__}
    write_json(folder / _ABOUT, about)


def check_same(checkpoint: Path, cell: Cell) -> None:
    """Refuse to continue another configuration's training.

    Raises:
        ConfigurationError: naming what differs.
        RecordError: the checkpoint does not say what it is.
    """
    about = checkpoint / _ABOUT
    try:
        then = cell.from_dict(read_json(about)["cell"]).to_dict()  # an older one lacks fields that came later
    except (KeyError, TypeError) as error:
        raise RecordError(f"{about}: not what benchbox writes ({type(error).__name__}: {error})") from None
    now = cell.to_dict()
    different = sorted(key for key in now if now[key] != then[key])
    if different:
        changes = ", ".join(f"{key} is {then[key]!r} there and {now[key]!r} here" for key in different)
        raise ConfigurationError(
            Problem(str(checkpoint), f"another configuration: {changes}", "resume with what it was trained with")
        )


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)
