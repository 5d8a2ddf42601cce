"""Gradient norms that are spikes: their steps are skipped, or training stops."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox.errors import GradientSpikeError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.spec.optim import SpikeSpec

MIN_NORMS = 10  # a median of fewer norms would call the noise of the first steps spikes


class SpikeGuard:
    """Judge of gradient norms, with the norms that it compares them with and the number of skipped steps.

    Norms of skipped steps are not remembered, so a limit that all norms exceed from some step on would skip every later step.
    As many skipped steps in a row as the window has norms, and at least `MIN_NORMS`, therefore end the training.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self._spec = spec
        self._norms: deque[float] = deque(maxlen=spec.window)
        self.skipped = 0
        self.skipped_in_a_row = 0

    @property
    def limit(self) -> float:
        """The norm above which a norm is a spike now; infinite until enough norms are known."""
        if self._spec.max is not None:
            return self._spec.max
        if len(self._norms) < min(MIN_NORMS, self._spec.window):
            return math.inf
        return self._spec.factor * median(self._norms)

    def skips(self, norm: float) -> bool:
        """Return whether the step with this gradient norm is skipped. Only the norms of steps that are taken are remembered.

        Raises:
            GradientSpikeError: the norm is a spike, and spikes stop the training or too many steps in a row were skipped.
            NonFiniteError: likewise, and the norm is not finite.
        """
        limit = self.limit
        if math.isfinite(norm) and norm <= limit:
            self._norms.append(norm)
            self.skipped_in_a_row = 0
            return False
        if self._spec.action == "skip":
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= max(self._spec.window, MIN_NORMS):
                raise self._endless(norm, limit)
            return True
        if math.isfinite(norm):
            raise GradientSpikeError(f"the gradient norm is {norm:.4g}, above {limit:.4g}: optim.spike stops the training")
        raise NonFiniteError(f"the gradient norm is {norm}: optim.spike stops the training")

    def _endless(self, norm: float, limit: float) -> GradientSpikeError | NonFiniteError:
        """Return the error of a training that takes no steps any more."""
        skipped = f"optim.spike skipped {self.skipped_in_a_row} steps in a row, and the weights no longer change"
        if not math.isfinite(norm):
            remedy = "train anew with a lower optim.lr, or find the sample or layer that is not finite"
            return NonFiniteError(f"{skipped}: the gradient norm is {norm}; {remedy}")
        setting = "factor" if self._spec.max is None else "max"
        remedy = f"train anew with a higher optim.spike.{setting} or a lower optim.lr"
        return GradientSpikeError(f"{skipped}: the gradient norm is {norm:.4g}, above {limit:.4g}; {remedy}")

    def forget(self) -> None:
        """Forget the norms so far: those of a frozen backbone say nothing about the norms after it thaws."""
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next judgements depend on, in plain values."""
        return {"norms": list(self._norms), "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict`, also that of a version that did not count steps in a row."""
        self._norms = deque(state["norms"], maxlen=self._spec.window)
        self.skipped = int(state["skipped"])
        self.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
