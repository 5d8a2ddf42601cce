"""File of a rank's last collectives and stack, `collectives-rank<r>.json`: the rank writes it, the launcher reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, cast

from benchbox.errors import RecordError
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.launch_record import CollectiveCall

LAST_CALLS = 16  # that a rank writes


class RankCollectives(TypedDict):
    """Content of the file."""

    calls: list[CollectiveCall]  # oldest first
    stack: str  # of the main thread
    reason: str | None  # why there are no calls


def read_rank_collectives(path: Path) -> RankCollectives | None:
    """Return what a rank wrote, or None if it wrote nothing that can be read."""
    try:
        return cast("RankCollectives", read_json(path))
    except RecordError:
        return None
