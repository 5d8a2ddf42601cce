"""Measured steps that did less than a whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchbox.registry.launch_record import LaunchRecord


def partial_steps(record: LaunchRecord) -> tuple[str, ...]:
    """Return why measured steps did less than a whole step; nothing where all were whole."""
    return tuple(reason for reason in (skipped_updates(record), frozen_backbone(record)) if reason)


def skipped_updates(record: LaunchRecord) -> str | None:
    """Return that measured steps skipped the update of the weights; None where none did."""
    if any(step >= record["warmup_steps"] for step in record.get("skipped_steps") or ()):
        return "optim.spike skipped measured steps, which lack the update of the weights"
    return None


def frozen_backbone(record: LaunchRecord) -> str | None:
    """Return that the backbone was frozen in measured steps, for a time; None where it was in none."""
    if record["cell"]["optim"].get("freeze_backbone_steps", 0) > record["warmup_steps"]:  # older records have none
        return "the backbone is frozen in measured steps (optim.freeze_backbone_steps)"
    return None
