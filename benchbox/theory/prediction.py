"""The prediction for a cell: memory by component, communication, and time on a link and a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.theory.communication import Traffic, predict_traffic
from benchbox.theory.links import compute_time_s, traffic_time_s
from benchbox.theory.sharding import MODELS

if TYPE_CHECKING:
    from benchbox.theory.ledger import Ledger
    from benchbox.theory.links import Device, Link, MeasuredLink
    from benchbox.theory.structure import CellSetup, Structure, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction for one rank, the one that needs most, in one optimizer step.

    `components` are the bytes by component at the moment of the peak, which is in phase `moment`; `resident_bytes` is what
    stays from step to step: a lower bound of every batch. `logits_bytes`, the largest product that forward keeps, is part of
    the activations. FLOPs are of a rank.
    """

    peak_bytes: int
    moment: str
    components: dict[str, int]
    resident_bytes: int
    logits_bytes: int
    collectives: Traffic
    model_flops: int
    recomputed_flops: int
    optimizer_bytes: int  # read and written by the optimizer step
    world_size: int
    total_numel: int  # of the policy
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def step_time_s(self, device: Device, link: Link | MeasuredLink | None) -> tuple[float, float]:
        """Return (lower, upper) bounds of a step's seconds: communication overlaps with computation wholly, or not at all.

        Neither counts what no formula knows: launch latencies, kernels below the peak, the data loader. One rank needs no link.
        """
        compute = compute_time_s(self.model_flops + self.recomputed_flops, self.optimizer_bytes, device)
        communication = self.communication_time_s(link)
        return max(compute, communication), compute + communication

    def communication_time_s(self, link: Link | MeasuredLink | None) -> float:
        """Return the seconds of all collectives of a step if none overlaps with computation."""
        if link is None:
            assert self.world_size == 1, "several ranks communicate over a link"
            return 0.0
        return traffic_time_s(self.collectives, self.world_size, link)


def predict(structure: Structure, timeline: Timeline, setup: CellSetup, notes: tuple[str, ...] = ()) -> Estimate:
    """Return the prediction for a policy of this structure and timeline in this setup."""
    model = MODELS[setup.backend](structure, timeline, setup)
    ledger = model.run()
    stepped = model.stepped_numel
    moments = setup.states * setup.moment_size
    return Estimate(
        peak_bytes=ledger.peak,
        moment=ledger.moment,
        components={name: size for name, size in ledger.at_peak.items() if size},
        resident_bytes=_resident(ledger),
        logits_bytes=timeline.logits_bytes,
        collectives=predict_traffic(structure, timeline, setup),
        model_flops=timeline.model_flops * setup.accumulation,
        recomputed_flops=timeline.recomputed_flops * setup.accumulation,
        # weights and moments are read and written, the gradient is read, the live copy written
        optimizer_bytes=stepped * (2 * (setup.stepped_size + moments) + 2 * setup.live_size),
        world_size=setup.world_size,
        total_numel=structure.numel,
        notes=list(notes),
    )


def _resident(ledger: Ledger) -> int:
    return sum(ledger.current[name] for name in ("parameters", "masters", "moments", "averages", "buffers"))
