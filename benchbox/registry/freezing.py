"""Freeze presets by name: the parts of a policy that do not train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePreset:
    """A preset that selects frozen parameters by their role. `requires_tower` is a tower that the policy must train."""

    name: str
    summary: str
    freezes: Callable[[Role], bool]
    requires_tower: str | None = None


FREEZE_PRESETS: dict[str, FreezePreset] = {
    preset.name: preset
    for preset in (
        FreezePreset(name="full", summary="everything trains", freezes=lambda _: False),
        FreezePreset(
            name="freeze_vision",
            summary="the vision tower and its projector are frozen",
            freezes=lambda role: role.tower == "vision",
            requires_tower="vision",
        ),
        FreezePreset(
            name="train_expert_only",
            summary="the action expert and all parts outside the vision-language model train; the model itself is frozen",
            freezes=lambda role: role.part != "head",
            requires_tower="expert",
        ),
    )
}
