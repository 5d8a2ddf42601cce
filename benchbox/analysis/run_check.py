"""The form of a check of a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import RunStore

LaunchKey = tuple[str, int]  # id of the cell, number of the launch
Problem = tuple[LaunchKey | None, str]


class RunCheck:
    """A check of a run that is given its records one at a time, so that it need not hold them.

    `applies` is set to True where the run has what the check is about.
    """

    applies = True

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def add(self, _record: LaunchRecord, /) -> Iterable[str]:
        """Return what is wrong with a record."""
        return ()

    def finish(self) -> Iterable[Problem]:
        """Return what is wrong with the run, once it has been given all records."""
        return ()
