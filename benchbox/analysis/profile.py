"""The profile of a cell: times and rates by phase, tower and operation on the slowest rank, beside the measured peaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypedDict, cast

from benchbox import __version__
from benchbox.analysis.roofline import Attainment, attainment, describe_shares
from benchbox.analysis.summary import compiled_in_measured_steps
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.phases import OUTSIDE_PHASES, PHASES
from benchbox.store.host_state import merge_host_state
from benchbox.store.peaks import MeasuredPeaks, group_name, no_peaks
from benchbox.store.rank_profile import UNKNOWN_TOWER
from benchbox.store.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchbox.registry.launch_record import HostState, LaunchRecord
    from benchbox.store.rank_profile import OperatorTime, PhaseBytes, RankProfile
    from benchbox.store.rank_result import RankResult

NO_TOWER = "none"
_SPLIT_PHASES = ("forward", "backward")  # those whose operations belong to towers
_COMPILED_TOWERS = "torch.compile has made one function of several towers"
_NOTABLE = 0.01  # share of a step from which on the summary names a phase


class PhaseProfile(Attainment):
    """One phase of a mean step."""

    phase: str
    seconds: float
    share: float  # of the step
    collective_bytes: int


class TowerProfile(TypedDict):
    """One tower in forward or backward. `share` is that of the profiled steps; `seconds` is the same share of timed steps."""

    tower: str
    phase: str
    share: float
    seconds: float
    flops: int
    of_peak: float | None


class Communication(TypedDict):
    """Collectives of a step, and the time that an all-reduce of as many bytes takes at its measured rate.

    An all-gather or a reduce-scatter of the same bytes takes half of that in a ring. Null without a measured rate.
    """

    bytes: int  # of the larger of input and output
    all_reduce_bytes_per_s: float | None
    seconds: float | None
    share: float | None  # of the step
    kernels_s: float | None  # of a profiled step, waiting for other ranks included; null where they have no kernels


class Profile(TypedDict):
    """Contents of `profile.json`."""

    schema_version: int
    benchbox_version: str
    cell_id: str
    cell: Mapping[str, Any]
    machine: str
    group: str  # of ranks, see `group_name`
    peaks: dict[str, Any] | None
    peaks_reason: str | None  # why they are null
    rank: int  # the slowest, whose figures these are
    step_s: float  # mean
    profiled_step_s: float  # mean, under the profiler
    phases: list[PhaseProfile]
    fused_phases: dict[str, str]
    towers: list[TowerProfile]
    towers_reason: str | None  # why a tower is unknown
    communication: Communication | None  # null for one rank
    operators: list[OperatorTime]  # of the profiled steps, longest first
    profiled_s: float  # of the profiled steps together
    recomputed_flops: int
    summary: str | None  # null without peaks
    host: HostState | None  # while steps were timed
    busy_host: list[str]  # why the times deserve less trust
    compilation_doubts: list[str]  # why they are not those of a compiled step
    ranks: Sequence[RankProfile]


def build_profile(
    cell_id: str, cell: Mapping[str, Any], ranks: Sequence[RankProfile], measured: Mapping[str, MeasuredPeaks]
) -> Profile:
    """Return the profile of a cell from those of its ranks.

    Args:
        cell_id: of the cell.
        cell: `Cell.to_dict()`.
        ranks: in order.
        measured: peaks of the machine, by group of ranks.
    """
    slowest = max(ranks, key=lambda rank: fmean(rank["step_s"]))
    group = group_name(slowest["device"], len(ranks), slowest["threads"])
    peaks = measured.get(group)
    reason = None if peaks else no_peaks(group, len(ranks))
    phases, towers = _phases(slowest, peaks, reason), _towers(slowest, peaks)
    host = merge_host_state(cast("Sequence[RankResult]", ranks))
    return {
        "schema_version": SCHEMA_VERSION,
        "benchbox_version": __version__,
        "cell_id": cell_id,
        "cell": cell,
        "machine": slowest["machine"],
        "group": group,
        "peaks": None if peaks is None else _peaks(peaks, slowest),
        "peaks_reason": reason,
        "rank": slowest["rank"],
        "step_s": fmean(slowest["step_s"]),
        "profiled_step_s": fmean(slowest["profiled_step_s"]),
        "phases": phases,
        "fused_phases": slowest["fused_phases"],
        "towers": towers,
        "towers_reason": _COMPILED_TOWERS if any(row["tower"] == UNKNOWN_TOWER for row in towers) else None,
        "communication": _communication(slowest, peaks) if len(ranks) > 1 else None,
        "operators": slowest["operators"],
        "profiled_s": sum(slowest["profiled_step_s"]),
        "recomputed_flops": slowest["recomputed_flops"],
        "summary": None if peaks is None else _summary(phases),
        "host": host,
        "busy_host": list(busy_reasons(cast("LaunchRecord", {"host": host}))),
        "compilation_doubts": list(_compilation_doubts(ranks)),
        "ranks": ranks,
    }


def _compilation_doubts(ranks: Sequence[RankProfile]) -> Iterator[str]:
    compiled = [rank["compilation"] for rank in ranks if rank["compilation"] is not None]
    record = cast("LaunchRecord", {"compilation": {"per_rank": compiled}})
    if compiled_in_measured_steps(record):
        yield "torch.compile compiled something in timed steps; more warm-up steps help, unless shapes change"
    if any(rank.get("late_compilations") for rank in ranks):
        yield "torch.compile compiled something in the steps under the profiler: times of towers and operations are of them too"
    if limited := dict.fromkeys(entry["function"] for rank in compiled for entry in rank.get("limits_reached", ())):
        yield f"torch.compile reached its limit of variants of {', '.join(limited)}: further ones ran uncompiled"
    if uncompiled := dict.fromkeys(entry["function"] for rank in compiled for entry in rank.get("uncompiled", ())):
        yield f"torch.compile gave up {', '.join(uncompiled)}, which ran uncompiled"


def _peaks(peaks: MeasuredPeaks, rank: RankProfile) -> dict[str, Any]:
    return {**asdict(peaks), "uncertainty": peaks.uncertainty(product["dtype"] for product in rank["products"])}


def _phases(rank: RankProfile, peaks: MeasuredPeaks | None, reason: str | None) -> list[PhaseProfile]:
    """Return the phases in the order of a step, and what is outside of them where anything is."""
    step_s = fmean(rank["step_s"])
    seconds = {phase: fmean(rank["phases_s"][phase]) for phase in PHASES if phase in rank["phases_s"]}
    seconds[OUTSIDE_PHASES] = max(step_s - sum(seconds.values()), 0.0)
    rows: list[PhaseProfile] = []
    for phase, phase_s in seconds.items():
        if phase_s <= 0:
            continue
        unseen = None if phase in rank["bytes_reasons"] else 0
        sizes: PhaseBytes = rank["bytes"].get(phase, {"read": unseen, "written": unseen, "collectives": 0})
        read, written = sizes["read"], sizes["written"]
        flops: Counter[tuple[str, str]] = Counter()
        for product in rank["products"]:
            if product["phase"] == phase:
                flops[product["dtype"], product["shape"]] += product["flops"]
        unknown = rank["flops_reason"]
        rates = attainment(
            phase_s,
            None if unknown else flops,
            None if read is None or written is None else read + written,
            peaks,
            missing=(peaks and unknown) or reason,
            bytes_missing=rank["bytes_reasons"].get(phase),
        )
        rows.append(
            {
                "phase": phase,
                "seconds": phase_s,
                "share": phase_s / step_s,
                "collective_bytes": sizes["collectives"],
                **rates,
            }
        )
    return rows


def _communication(rank: RankProfile, peaks: MeasuredPeaks | None) -> Communication:
    size = sum(sizes["collectives"] for sizes in rank["bytes"].values())
    rate = None if peaks is None or peaks.all_reduce is None else peaks.all_reduce["per_s"]
    seconds = None if rate is None else size / rate
    share = None if seconds is None else seconds / fmean(rank["step_s"])
    kernels_s = rank.get("collective_s")
    steps = len(rank["profiled_step_s"])
    return {
        "bytes": size,
        "all_reduce_bytes_per_s": rate,
        "seconds": seconds,
        "share": share,
        "kernels_s": None if kernels_s is None else kernels_s / steps,
    }


def _towers(rank: RankProfile, peaks: MeasuredPeaks | None) -> list[TowerProfile]:
    rows: list[TowerProfile] = []
    for phase in _SPLIT_PHASES:
        times = rank["tower_s"].get(phase, {})
        profiled_s = sum(times.values())
        if not profiled_s or phase not in rank["phases_s"]:
            continue
        phase_s = fmean(rank["phases_s"][phase])
        flops: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        for product in rank["products"]:
            if product["phase"] == phase:
                flops[product["tower"] or ""][product["dtype"], product["shape"]] += product["flops"]
        for tower in sorted(times.keys() | flops.keys(), key=lambda name: (not name, -times.get(name, 0.0))):
            share = times.get(tower, 0.0) / profiled_s
            seconds = share * phase_s
            rates = attainment(seconds, flops[tower], 0, peaks) if seconds else None
            rows.append(
                {
                    "tower": tower or NO_TOWER,
                    "phase": phase,
                    "share": share,
                    "seconds": seconds,
                    "flops": sum(flops[tower].values()),
                    "of_peak": None if rates is None else rates["of_peak"],
                }
            )
    return rows


def _summary(phases: Iterable[PhaseProfile]) -> str | None:
    """Say how near the phases with products, and the optimizer, are to what this device can do."""
    notable = [row for row in phases if row["share"] >= _NOTABLE]
    products = {row["phase"]: f"{row['of_peak']:.0%}" for row in notable if row["of_peak"] is not None}
    of_memory = {row["phase"]: f"{row['of_memory']:.0%}" for row in notable if row["of_memory"] is not None}
    return describe_shares(products, of_memory.get("optimizer")) or None
