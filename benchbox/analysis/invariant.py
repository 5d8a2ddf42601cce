"""The form of an invariant: a sentence about one launch record, and the check of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchbox.registry.launch_record import LaunchRecord


@dataclass(frozen=True, slots=True)
class Invariant:
    """A statement, and a check that returns its violations, or None where the record has nothing that it applies to."""

    sentence: str
    check: Callable[[LaunchRecord], Iterable[str] | None]
