"""Checkpoints on disk: the names of their folders, and the description inside each."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.table import flatten

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

_PREFIX = "step-"
_DESCRIPTION = "checkpoint.json"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(paths, key=checkpoint_steps)


def checkpoint_steps(checkpoint: Path) -> int:
    """Return the number of optimizer steps after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoint_name(steps: int) -> str:
    return f"{_PREFIX}{steps:08d}"


def write_description(folder: Path, cell: Cell, steps: int) -> None:
    """Write the description of a checkpoint into its folder: its steps and the cell that was trained."""
    description = {"schema_version": 1, "steps": steps, "cell": cell.to_dict(), "benchbox_version": __version__}
    write_json(folder / _DESCRIPTION, description)


def check_same_configuration(checkpoint: Path, cell: Cell) -> None:
    """Raise ConfigurationError if a checkpoint is from the training of another configuration.

    Raises:
        ConfigurationError: naming what differs.
        RecordError: the checkpoint has no valid description.
    """
    description = checkpoint / _DESCRIPTION
    try:
        saved = cell.from_dict(read_json(description)["cell"])  # an older one lacks fields that came later
    except (KeyError, TypeError) as error:
        raise RecordError(f"{description}: not what benchbox writes ({type(error).__name__}: {error})") from None
    there, here = _comparable(saved), _comparable(cell)
    if len(saved.data.lerobot_datasets) != len(cell.data.lerobot_datasets):
        there["data"], here["data"] = (f"{len(spec.data.lerobot_datasets)} dataset(s)" for spec in (saved, cell))
    different = sorted(key for key in here if here[key] != there[key])
    if different:
        changes = ", ".join(f"{key} is {there[key]} there and {here[key]} here" for key in different)
        raise ConfigurationError(
            Problem(str(checkpoint), f"another configuration: {changes}", "resume with what it was trained with")
        )


def _comparable(cell: Cell) -> dict[str, str]:
    """Return the fields of a cell as text, those of its data and optimizer by dotted keys; datasets in `data`."""
    fields = flatten(cell.to_dict())
    for key in ("data.path", "data.datasets"):
        del fields[key]
    data = {"data": [dataset.to_dict() for dataset in cell.data.lerobot_datasets]}
    return {key: repr(value) for key, value in (fields | data).items()}


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)
