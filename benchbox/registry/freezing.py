"""Which parts of a policy train, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """A preset: which parameters stay as they are, by their role. `about` is the tower without which it means nothing."""

    name: str
    summary: str
    freezes: Callable[[Role], bool]
    about: str | None = None


FREEZES: dict[str, Freeze] = {
    preset.name: preset
    for preset in (
        Freeze(name="full", summary="everything trains", freezes=lambda _: False),
        Freeze(
            name="freeze_vision",
            summary="the vision tower and its projector stay as they are",
            freezes=lambda role: role.tower == "vision",
            about="vision",
        ),
        Freeze(
            name="train_expert_only",
            summary="the action expert trains, and what stands beside the vision-language model; the model itself does not",
            freezes=lambda role: role.part != "head",
            about="expert",
        ),
    )
}
