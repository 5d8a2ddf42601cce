"""The prediction for a cell: memory by component, communication, and time on a link and a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from benchbox.theory.communication import Traffic, predict_traffic
from benchbox.theory.links import compute_time_s, traffic_time_s
from benchbox.theory.sharding import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.theory.ledger import Ledger
    from benchbox.theory.links import Device, Link, MeasuredLink
    from benchbox.theory.structure import CellSetup, Structure, Timeline

_AVERAGE_SIZE = 4  # of an element, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction for one rank, the one that needs most, in one optimizer step.

    `components` are the bytes by component at the moment of the peak, which is in phase `moment`; `resident_bytes` are
    parameters, masters, moments, averages and buffers, which stay from step to step: a lower bound of every batch.
    `logits_bytes`, the largest product that forward keeps, is part of the activations. FLOPs are of a rank.
    `collectives_by_ranks` are the same collectives by the number of ranks among which they run, as text: a hybrid backend
    gathers among those that share a copy of the parameters. `smallest_step_flops` are those of a step whose samples lack every
    optional part, recomputed ones included: no step takes less, unless padding is left out. None where they are not known.
    `has_size_of_step` is False where padding is left out and no rank of the predicted step has a micro-batch as large.
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
    collectives_by_ranks: dict[str, Traffic] = field(default_factory=dict)
    smallest_step_flops: int | None = None
    has_size_of_step: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the estimate that `to_dict` gave these values of; those of a newer benchbox are ignored."""
        return cls(**{entry.name: values[entry.name] for entry in fields(cls) if entry.name in values})

    def step_time_s(self, device: Device, link: Link | MeasuredLink | None) -> tuple[float, float]:
        """Return (lower, upper) bounds of a step's seconds: communication overlaps with computation wholly, or not at all.

        Neither counts what no formula knows: launch latencies, kernels below the peak, the data loader. One rank needs no link.
        """
        compute, communication = self.compute_time_s(device), self.communication_time_s(link)
        return max(compute, communication), compute + communication

    def compute_time_s(self, device: Device) -> float:
        """Return the seconds of all products of a step at the peak, and of the optimizer at the memory's bandwidth."""
        return compute_time_s(self.model_flops + self.recomputed_flops, self.optimizer_bytes, device)

    def communication_time_s(self, link: Link | MeasuredLink | None) -> float:
        """Return the seconds of all collectives of a step if none overlaps with computation."""
        if link is None:
            assert self.world_size == 1, "several ranks communicate over a link"
            return 0.0
        return sum(traffic_time_s(traffic, int(ranks), link) for ranks, traffic in self.collectives_by_ranks.items())


def predict(structure: Structure, timeline: Timeline, setup: CellSetup, notes: tuple[str, ...] = ()) -> Estimate:
    """Return the prediction for a policy of this structure and timeline in this setup."""
    model = MODELS[setup.backend](structure, timeline, setup)
    ledger = model.run()
    tally = predict_traffic(structure, timeline, setup)
    flops, share = timeline.model_flops + timeline.recomputed_flops, timeline.smallest_share
    return Estimate(
        peak_bytes=ledger.peak,
        moment=ledger.moment,
        components={name: size for name, size in ledger.at_peak.items() if size},
        resident_bytes=_resident(ledger),
        logits_bytes=timeline.logits_bytes,
        collectives=tally.traffic,
        model_flops=timeline.model_flops * setup.accumulation,
        recomputed_flops=timeline.recomputed_flops * setup.accumulation,
        optimizer_bytes=model.stepped_numel * _optimizer_bytes_per_element(setup),
        world_size=setup.world_size,
        total_numel=structure.numel,
        notes=list(notes),
        collectives_by_ranks={str(ranks): traffic for ranks, traffic in tally.traffic_by_ranks.items()},
        smallest_step_flops=None if share is None else int(flops * share) * setup.accumulation,
        has_size_of_step=timeline.has_size_of_step,
    )


def _optimizer_bytes_per_element(setup: CellSetup) -> int:
    """Return the bytes that the optimizer step reads and writes for each element that it steps.

    Weights and moments are read and written. With masters a gradient in the dtype of the live parameter is read, and that
    parameter written. Without, the gradient has the dtype of what is stepped. Averages are read and written.
    """
    weights = 2 * (setup.stepped_size + setup.states * setup.moment_size)
    others = 2 * setup.live_size if setup.masters else setup.stepped_size
    return weights + others + (2 * _AVERAGE_SIZE if setup.averages else 0)


def _resident(ledger: Ledger) -> int:
    return sum(ledger.current[name] for name in ("parameters", "masters", "moments", "averages", "buffers"))
