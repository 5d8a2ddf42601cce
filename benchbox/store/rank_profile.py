"""The profile of one rank, `rank<r>.json` of a profile job. `benchbox.analysis.profile` joins those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    from benchbox.registry.launch_environment import RankEnvironment
    from benchbox.registry.launch_record import CompilationRecord
    from benchbox.store.rank_result import RankHost


UNKNOWN_TOWER = "unknown"  # of operations in one compiled function of several towers


class ProductCost(TypedDict):
    """FLOPs of the matrix products in one step that agree in phase, tower, dtype and class of shape."""

    phase: str
    tower: str | None  # null where the work is of no tower
    dtype: str  # of the factors
    shape: str  # class
    flops: int


class PhaseBytes(TypedDict):
    """Bytes of the operations of a phase in one step."""

    read: int | None  # null where not every operation was seen
    written: int | None
    collectives: int  # of the larger of input and output; not in the others


class OperatorTime(TypedDict):
    """Operations of one name in the profiled steps."""

    name: str
    calls: int
    self_s: float  # without the operations that they call


class RankProfile(TypedDict):
    """Profile of one rank."""

    rank: int
    device: str  # cpu or cuda
    threads: int
    machine: str
    torch: str
    step_s: list[float]  # timed steps, without the profiler
    phases_s: dict[str, list[float]]  # the same steps
    fused_phases: dict[str, str]  # phase -> why it has no time of its own
    samples: int  # in these steps
    host: NotRequired[RankHost]  # in these steps
    profiled_step_s: list[float]  # steps under the profiler
    tower_s: dict[str, dict[str, float]]  # phase -> tower -> time in the profiled steps; the tower "" is none
    collective_s: NotRequired[float | None]  # of kernels of collectives in the profiled steps, not in those of towers
    operators: list[OperatorTime]  # longest first
    products: list[ProductCost]  # of one step
    recomputed_flops: int
    flops_reason: str | None  # why the products are not complete
    bytes: dict[str, PhaseBytes]  # of one step, by phase
    bytes_reasons: dict[str, str]  # phase -> why they are null
    compilation: (
        CompilationRecord | None
    )  # until the end of the timed steps; null where compile is off and nothing was compiled
    late_compilations: NotRequired[int]  # in the steps under the profiler
    trace: str  # file name
    environment: RankEnvironment
