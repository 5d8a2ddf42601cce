"""Elastic restarts of a training: which failures are worth one, and the file `restarts.json` that lists those of a training."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchbox.store.checkpoints import newest_steps
from benchbox.store.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.launch.supervise.outcome import Outcome

# Errors of the configuration, the data or the disk, or of starting any rank: another attempt would end the same way.
_PERMANENT_ERRORS = ("ConfigurationError", "DataError", "CheckpointError", "RecordError", "LaunchError")
# Errors by which an audit or the guard against spikes ends a training: another attempt, from the newest checkpoint on, could
# miss what they have seen.
_VERDICTS = ("ThresholdError", "GradientSpikeError")
_STAGES = ("train", "validate")
_PROCESS_ERRORS = ("Killed", "Terminated", "ExitError")
FAILED_LAUNCH = "launch-failed-"  # prefix of the folders with the files of ranks that failed


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of a training after a rank died."""

    number: int  # from 1, of this invocation
    limit: int
    from_step: int  # of the checkpoint; 0 without one
    reason: str


def is_restartable(outcome: Outcome) -> bool:
    """Return whether a training that ended this way may succeed when it continues from its last checkpoint.

    It may if a process died, or a rank raised an error while it trained or validated. It is not started again after running out
    of device memory, a loss that is not finite, a hang, an error of the configuration or the data, a checkpoint that could not
    be written, an error before the training began, or when an audit or a spike was to end it.
    """
    error = outcome.error
    if outcome.status != "crash" or error is None or error["type"] in (*_PERMANENT_ERRORS, *_VERDICTS):
        return False
    return error["type"] in _PROCESS_ERRORS or error.get("stage") in _STAGES


def record_restart(folder: Path, outcome: Outcome, number: int, limit: int) -> Restart:
    """Keep the files of the ranks that failed as `launch-failed-<n>`, and add a restart to `restarts.json`."""
    assert outcome.error is not None
    error = outcome.error
    previous = read_restarts(folder)
    rank = f"rank {error['rank']}: " if error["rank"] is not None else ""
    first_line = next(iter(error["message"].splitlines()), "")
    restart = Restart(
        number=number,
        limit=limit,
        from_step=newest_steps(folder / "checkpoints"),
        reason=f"{rank}{error['type']}: {first_line}",
    )
    failed = folder / f"{FAILED_LAUNCH}{len(previous) + 1}"
    shutil.rmtree(failed, ignore_errors=True)
    (folder / "launch").rename(failed)
    write_json(folder / "restarts.json", {"restarts": [*previous, {**asdict(restart), "files": failed.name}]})
    return restart


def read_restarts(folder: Path) -> list[dict[str, object]]:
    """Return the restarts of a training so far, over all its invocations.

    Raises:
        RecordError: the file is damaged.
    """
    path = folder / "restarts.json"
    return list(read_json(path)["restarts"]) if path.exists() else []
