"""The form of an invariant: a sentence about one launch record, and the check of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchbox.registry.launch_record import LaunchRecord


def is_partly_frozen(record: LaunchRecord) -> bool:
    """Return whether the backbone was still frozen after the steps of `loss`: it may have no gradients and moments then."""
    frozen_steps: int = record["cell"]["optim"].get("freeze_backbone_steps", 0)  # older records have none
    return frozen_steps >= max(1, len(record["loss"] or ()))


@dataclass(frozen=True, slots=True)
class Invariant:
    """A statement, and a check that returns its violations, or None where the record has nothing that it applies to."""

    sentence: str
    check: Callable[[LaunchRecord], Iterable[str] | None]
