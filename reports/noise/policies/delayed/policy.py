"""pi05 with an injected slowdown: forward first sleeps for a share of the step before it.

Sizes name a size of pi05 and the share: `{size: tiny, delay: 0.05}` takes 5% longer for each step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchbox.registry.policies import policy_entry

from ..pi05.policy import Pi05
from ..pi05.policy import build as build_pi05

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes, Batch


class Delayed(Pi05):
    """pi05 whose steps take `1 + delay` times as long."""

    delay: float
    step_began_at: float | None
    slept_s: float

    def forward(self, batch: Batch, **options: Any) -> Any:
        now = time.perf_counter()
        last_step_s = 0.0 if self.step_began_at is None else now - self.step_began_at - self.slept_s
        self.step_began_at, self.slept_s = now, self.delay * last_step_s
        time.sleep(self.slept_s)
        return super().forward(batch, **options)


def build(preset: Mapping[str, Any], axes: Axes) -> Delayed:
    """Build pi05 in the size that the preset names, in float32 on torch's default device."""
    policy = build_pi05(policy_entry("pi05").presets[preset["size"]], axes)
    policy.__class__ = Delayed
    policy.delay, policy.step_began_at, policy.slept_s = preset["delay"], None, 0.0
    return policy
