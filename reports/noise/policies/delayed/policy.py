"""pi05 with an injected slowdown: forward first sleeps for a share of the median step before it.

Sizes name a size of pi05 and the share: steps of `{size: tiny, delay: 0.05}` take 5% longer.
"""

from __future__ import annotations

import time
from statistics import median
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
    step_began_at: float | None  # when its sleep had ended
    step_times_s: list[float]  # without sleep

    def forward(self, batch: Batch, **options: Any) -> Any:
        if self.step_began_at is not None:
            self.step_times_s.append(time.perf_counter() - self.step_began_at)
            time.sleep(self.delay * median(self.step_times_s))  # the median: between some steps there is more than a step
        self.step_began_at = time.perf_counter()
        return super().forward(batch, **options)


def build(preset: Mapping[str, Any], axes: Axes) -> Delayed:
    """Build pi05 in the size that the preset names, in float32 on torch's default device."""
    policy = build_pi05(policy_entry("pi05").presets[preset["size"]], axes)
    policy.__class__ = Delayed
    policy.delay, policy.step_began_at, policy.step_times_s = preset["delay"], None, []
    return policy
