"""The contract of a tracker."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Tracker(Protocol):
    """Receiver of the metrics of a training, on rank 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step, numbered from 0.

        Steps come in ascending order; one that a validation follows comes twice, with other names.
        """

    def close(self) -> None:
        """Write what is still buffered. No value follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTraining:
    """A training as a tracker describes it.

    `start` is the first step of this run: an earlier run may have logged it and later ones, which are repeated.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    start: int

    def run_id(self, tracker: str) -> str:
        """Return the id of a tracker's run of this training, kept in its folder; a training that starts anew gets a new one."""
        path = self.folder / f"{tracker}-id"
        if not (self.start and path.is_file()):
            path.write_text(uuid.uuid4().hex[:12])
        return path.read_text()
