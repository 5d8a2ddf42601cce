"""Sum of memory by component, and its peak."""

from __future__ import annotations

from dataclasses import dataclass, field

COMPONENTS = {
    "parameters": "what the rank stores of the parameters that compute",
    "masters": "what the optimizer steps, where that is not the parameters",
    "moments": "state of the optimizer, as large as what it steps",
    "averages": "exponential averages of the weights",
    "buffers": "buffers of the policy",
    "batch": "the micro-batches of the step",
    "gradients": "gradients, of this rank's shard and of what is not reduced yet",
    "activations": "results of forward that backward needs, and what both compute in between",
    "all_gather": "gathered parameters, and the buffers to gather them",
    "reduction": "buckets and buffers in which gradients are reduced",
    "workspace": "scratch memory of clipping and of the optimizer",
}


@dataclass(slots=True)
class Ledger:
    """Bytes by component as a step goes on. `at_peak` has them when their sum was largest, in `moment`."""

    current: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    total: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    moment: str = ""
    stage: str = "between steps"

    def add(self, component: str, size: int) -> None:
        """Add bytes to a component, or take them off it."""
        self.current[component] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak, self.moment = self.total, dict(self.current), self.stage

    def pass_through(self, component: str, size: int) -> None:
        """Add bytes that are freed before anything else happens."""
        self.add(component, size)
        self.add(component, -size)

    def clear(self, component: str) -> None:
        """Free all of a component."""
        self.add(component, -self.current[component])
