"""Shares of the measured peaks that forward, backward and the optimizer of a cell reach, by its launch records."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import TYPE_CHECKING, NamedTuple

from benchbox.analysis.invariants import FLOPS_TOLERANCE, formula_flops
from benchbox.analysis.partial_steps import frozen_backbone, skipped_updates
from benchbox.analysis.quantities import quantity
from benchbox.analysis.roofline import attainment
from benchbox.store.peaks import MeasuredPeaks, group_of, no_peaks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord, TowerFlops

FORWARD, BACKWARD, TOGETHER = "forward", "backward", "forward and backward"
_PHASES = {FORWARD: (FORWARD,), BACKWARD: (BACKWARD,), TOGETHER: (FORWARD, BACKWARD)}

# Bytes that AdamW reads and writes for each element at least. In float32 it reads weight, gradient and two moments, and writes
# all but the gradient. With float32 masters it reads a gradient and writes a live weight in 16 bits each.
ADAMW_BYTES = 28
_SIXTEEN_BIT = {"bfloat16", "float16"}


class Share(NamedTuple):
    """Rate of a phase on one rank, FLOP/s or bytes/s, and its share of the measured peak. A share that is null has a reason."""

    of_peak: float | None = None
    per_s: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakShares:
    """Shares of a cell, each of one rank in a mean step."""

    products: Mapping[str, Share]  # FORWARD and BACKWARD, or TOGETHER
    undivided: str | None  # why the FLOPs of forward and backward are known together alone; null where they are known apart
    recomputes: bool  # whether FLOPs of backward include recomputed ones
    optimizer: Share
    dtype: str  # of the products
    peaks: MeasuredPeaks | None  # that the rates are compared with
    torch: str | None  # of the launch


class _Flops(NamedTuple):
    """FLOPs of all ranks in a step by what of the step they are, or why they are unknown."""

    counts: Mapping[str, int | None]
    reason: str | None = None
    undivided: str | None = None
    recomputes: bool = False


def peak_shares(summary: CellSummary, record: LaunchRecord, measured: Mapping[str, MeasuredPeaks] | str) -> PeakShares:
    """Return the shares of a cell.

    Args:
        summary: of the cell.
        record: a launch of it that ended ok.
        measured: peaks of the machine of the run by group of ranks, or why they are unknown.
    """
    peaks = measured if isinstance(measured, str) else _peaks_of(record, measured)
    general = peaks if isinstance(peaks, str) else frozen_backbone(record)
    flops, times = _flops(record), summary.phases
    dtype, dtype_reason = _dtype_of_products(record, on_gpu=not isinstance(peaks, str) and peaks.device == "cuda")
    products: dict[str, Share] = {}
    for name, count in flops.counts.items():
        seconds = sum(times.get(phase, 0.0) for phase in _PHASES[name])
        reason = general or _untimed(record, times, _PHASES[name]) or flops.reason or dtype_reason
        if reason or count is None or isinstance(peaks, str):
            products[name] = Share(reason=reason)
            continue
        rates = attainment(seconds, {(dtype, "large"): count // peaks.ranks}, None, peaks)
        products[name] = Share(rates["of_peak"], rates["flops_per_s"], rates["flops_reason"])
    return PeakShares(
        products=products,
        undivided=flops.undivided,
        recomputes=flops.recomputes,
        optimizer=_share_of_optimizer(record, times, peaks, general),
        dtype=dtype,
        peaks=None if isinstance(peaks, str) else peaks,
        torch=(record["environment"] or {}).get("torch"),
    )


def _peaks_of(record: LaunchRecord, measured: Mapping[str, MeasuredPeaks]) -> MeasuredPeaks | str:
    group = group_of(record)
    if group is None:
        return "the device or the threads of the launch were not recorded"
    return measured[group] if group in measured else no_peaks(group, record["cell"]["world_size"])


def _untimed(record: LaunchRecord, times: Mapping[str, float], phases: Iterable[str]) -> str | None:
    """Return why phases have no time that is theirs alone; None where they have."""
    fused = record["fused_phases"] or {}
    for phase in (*phases, "optimizer"):  # one without a time of its own may run in backward
        if phase in fused:
            return f"{phase} has no time of its own: {fused[phase]}"
    return next((f"{phase} was not timed" for phase in phases if not times.get(phase)), None)


def _flops(record: LaunchRecord) -> _Flops:
    """Return the FLOPs of forward and backward apart where the count of both confirms the formula of the policy.

    The probe counts them together. The formula says which of them are of forward; backward has the others, recomputed ones too.
    """
    flops, unknown = record["flops"], {FORWARD: None, BACKWARD: None}
    if flops is None:
        return _Flops(unknown, "FLOPs were not recorded")
    model, recomputed = flops["model_flops_per_step"], flops.get("recomputed_flops_per_step")
    if model is None or recomputed is None:
        return _Flops(unknown, flops["reason"] or "FLOPs that are recomputed were not recorded")
    total, towers = model + recomputed, flops.get("per_tower")
    if not towers:
        undivided: str | None = flops.get("per_tower_reason") or "no formula of the policy was recorded"
    else:
        undivided = _contradiction(model, recomputed, towers)
    if undivided or not towers:
        return _Flops({TOGETHER: total}, undivided=undivided, recomputes=recomputed > 0)
    forward = sum(tower["forward"] for tower in towers.values())
    return _Flops({FORWARD: forward, BACKWARD: total - forward}, recomputes=recomputed > 0)


def _contradiction(model: int, recomputed: int, towers: Mapping[str, TowerFlops]) -> str | None:
    """Return that the formula is not that of what was counted; None where it is."""
    by_formula = formula_flops(towers)
    if all(isclose(*pair, rel_tol=FLOPS_TOLERANCE) for pair in zip((model, recomputed), by_formula, strict=True)):
        return None
    formula, counted = (quantity(count, "FLOP") for count in (sum(by_formula), model + recomputed))
    return f"the formula of the policy gives {formula} for a step, and {counted} were counted"


def _dtype_of_products(record: LaunchRecord, *, on_gpu: bool) -> tuple[str, str | None]:
    """Return the dtype of the matrix products, and why there is no one peak for them, if there is none."""
    observed = _dtypes(record, "product")
    if not observed:
        return "", "the dtype of products was not recorded"
    dtype = _words(observed)
    if len(observed) > 1:
        return dtype, f"products ran in {dtype}, and their FLOPs were not recorded by dtype"
    if dtype == "float32" and on_gpu:
        return dtype, "a GPU may run products of float32 in TF32, and it was not recorded which of them it did"
    return dtype, None


def _share_of_optimizer(
    record: LaunchRecord, times: Mapping[str, float], peaks: MeasuredPeaks | str, general: str | None
) -> Share:
    size = _optimizer_bytes(record)
    reason = general or _untimed(record, times, ("optimizer",))
    if reason is None and "clip" in (record["fused_phases"] or {}):
        reason = "clip has no time of its own, and may be a part of that of the optimizer"
    reason = reason or skipped_updates(record) or (size if isinstance(size, str) else None)
    if reason or isinstance(size, str) or isinstance(peaks, str):
        return Share(reason=reason)
    rates = attainment(times["optimizer"], {}, size // peaks.ranks, peaks)
    return Share(rates["of_memory"], rates["bytes_per_s"], rates["bytes_reason"])


def _optimizer_bytes(record: LaunchRecord) -> int | str:
    """Return the least bytes that the optimizers of all ranks read and write in a step, or why they are unknown."""
    observed, precision = record["observed"], record["precision"]
    if observed is None or precision is None or not precision["census"]:
        return "the tensors of the optimizer were not recorded"
    stepping = observed["optimizer_chain"][-1]
    if stepping != "AdamW":
        return f"the bytes that {stepping} reads and writes are not known"
    if "optimizer_fused" not in observed.get("settings", {}):
        return "it was not recorded whether AdamW is fused"
    if not observed["settings"]["optimizer_fused"]:
        return "AdamW is not fused, and the bytes that it then reads and writes are not known"
    if (moments := _dtypes(record, "exp_avg") | _dtypes(record, "exp_avg_sq")) != {"float32"}:
        return f"the bytes of AdamW are known for moments in float32, and these are in {_words(moments)}"
    gradients, masters = _dtypes(record, "gradient"), _dtypes(record, "master")
    if not gradients:
        return "the dtype of gradients was not recorded"
    if not gradients <= (_SIXTEEN_BIT if masters else {"float32"}):
        beside = "with" if masters else "without"
        return f"the bytes of AdamW are not known for gradients in {_words(gradients)} {beside} masters"
    return ADAMW_BYTES * sum(entry["elements"] for entry in precision["census"] if entry["kind"] == "exp_avg")


def _dtypes(record: LaunchRecord, kind: str) -> set[str]:
    precision = record["precision"]
    return {entry["dtype"] for entry in precision["census"] if entry["kind"] == kind} if precision else set()


def _words(dtypes: Iterable[str]) -> str:
    return " and ".join(sorted(dtypes))
