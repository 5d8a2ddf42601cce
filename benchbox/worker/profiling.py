"""The `profile` job of a rank: time steps, trace further steps, count the costs of one more, check what ran, write results."""

from __future__ import annotations

from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchbox.audit.subjects.session import observe_session
from benchbox.measure.compilation import CompilationWatch
from benchbox.measure.environment import environment
from benchbox.measure.host import HostWindow
from benchbox.measure.phases import CombinedInstrument, PhaseClock
from benchbox.measure.probe import StepProbe
from benchbox.measure.step_costs import StepCosts
from benchbox.measure.step_trace import TraceInstrument, read_trace
from benchbox.measure.towers import TowerTracker
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.optim.passes import pass_listeners
from benchbox.registry.recipes import TORCH_ADAMW, recipe_by_name
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.session.host_memory import check_host_memory
from benchbox.spec.cell import Cell
from benchbox.store.files import write_json
from benchbox.worker.expected import check_backend, check_compilation, check_step
from benchbox.worker.reporting import Reporter
from benchbox.worker.steps import run_steps, synchronize_ranks, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from benchbox.data.loading.loader import MicroBatchStream
    from benchbox.measure.phases import ProgressTracker
    from benchbox.measure.step_trace import TraceTimes
    from benchbox.registry.contracts import Role
    from benchbox.session import Session
    from benchbox.store.events import EventWriter
    from benchbox.store.rank_profile import PhaseBytes, RankProfile
    from benchbox.worker.job_file import ProfileJob

_LARGE_TRACE_EVENTS = 100_000  # of which a trace is compressed
_COMPILED_PHASES = ("forward", "backward")
_FUSED = "operations that torch.compile has fused are not seen, nor their bytes"
_KERNELS = "the optimizer of {} may have kernels of its own, whose bytes are not seen"
_FLEX = "FlexAttention runs compiled, and its {} are not seen"


def profile(job: ProfileJob, out: Path, rank: int, tracker: ProgressTracker, events: EventWriter) -> None:
    """Write `rank<r>.json`, the profile of this rank, and its trace.

    The profiler slows steps down, so the times of steps and phases are those of steps before it.

    Raises:
        MismatchError: what runs is not what was requested.
    """
    cell = Cell.from_dict(job["cell"])
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    policy = build_cell_policy(cell, [Path(directory) for directory in job["policy_dirs"]])
    check_host_memory(cell, policy)
    roles, units = policy.parameter_roles(), policy.layer_units()
    compilation = CompilationWatch(tracker, cell.compile)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        reporter.enter_stage("prepare")
        session = build_session(cell, policy, stream.statistics, reporter.enter_stage)
        check_backend(cell, session.backend.observe())

        reporter.enter_stage("warmup", job["warmup_steps"])
        with compilation:
            warm_up(session, stream, job["warmup_steps"], tracker, reporter)

        reporter.enter_stage("measure", job["timed_steps"])
        host, clock = HostWindow(session.device), PhaseClock(session.device)
        synchronize_ranks(session.device)  # no rank begins its first step while another one still reads the host
        with compilation.of_measured_steps():
            timed = run_steps(session, stream, job["timed_steps"], CombinedInstrument(clock, tracker), reporter)
        times, host_use, compiled = clock.drain(), host.close(rank), compilation.record()
        check_compilation(cell, compiled)

        reporter.enter_stage("profile", job["profiled_steps"] + 1)
        folder, compilations = Path(job["traces"]), compilation.compilations
        with compilation:  # a batch may have another length than all before it
            path, traced_step_s, traced = _trace_steps(
                session, roles, stream, job["profiled_steps"], folder, rank, tracker, reporter
            )
        late_compilations = compilation.compilations - compilations

        reporter.enter_stage("probe")
        synchronize_ranks(session.device)
        probe = StepProbe(session.model, units, session.device, is_compiled=cell.compile != "off")
        with compilation:
            costs = _count_costs(session, roles, stream, tracker)
            facts = observe_session(session, stream, recipe_by_name(cell.recipe), probe, tracker)
        probed = probe.result()
        check_step(
            cell,
            kernel=probed.attention_kernel,
            sites=probed.attention_sites,
            checkpointed=probed.checkpointed_modules,
            products=facts.products,
            stepped=facts.stepped,
        )

        reporter.enter_stage("write")
        machine = environment()
        bytes_reasons = _unseen_bytes(cell, session.device)
        result: RankProfile = {
            "rank": rank,
            "device": session.device.type,
            "threads": torch.get_num_threads(),
            "machine": machine["machine"],
            "torch": machine["torch"],
            "step_s": times.step_s,
            "phases_s": times.phases_s,
            "fused_phases": session.backend.fused_phases,
            "samples": sum(step.samples for step in timed),
            "host": host_use,
            "profiled_step_s": traced_step_s,
            "tower_s": traced.tower_s,
            "collective_s": traced.collective_s,
            "operators": traced.operators,
            "products": costs.products(),
            "recomputed_flops": costs.recomputed_flops,
            "flops_reason": _FLEX.format("products") if _runs_compiled_flex(cell, session.device) else None,
            "bytes": _known_bytes(costs.bytes_by_phase(), bytes_reasons),
            "bytes_reasons": bytes_reasons,
            "compilation": compiled,
            "late_compilations": late_compilations,
            "trace": path.name,
            "environment": machine,
        }
        write_json(out / f"rank{rank}.json", result, indent=None)


def _trace_steps(
    session: Session,
    roles: Mapping[str, Role],
    stream: MicroBatchStream,
    steps: int,
    folder: Path,
    rank: int,
    tracker: ProgressTracker,
    reporter: Reporter,
) -> tuple[Path, list[float], TraceTimes]:
    """Take steps under torch's profiler, and return the path of their trace, the time of each, and the times in the trace."""
    on_host = session.device.type == "cpu"
    activities = [ProfilerActivity.CPU] if on_host else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch_profile(activities=activities):  # the first step under a profiler pays for its initialisation
        run_steps(session, stream, 1, tracker, reporter)
    synchronize_ranks(session.device)
    towers = TowerTracker(session.model, roles, annotate=True)
    clock = PhaseClock(session.device)  # in the trace a step is that of the host, which need not wait for its device
    instruments = CombinedInstrument(clock, tracker, TraceInstrument())
    with torch_profile(activities=activities) as profiler, towers, _listening(lambda *_: None):
        run_steps(session, stream, steps, instruments, reporter)
        if not on_host:
            torch.cuda.synchronize(session.device)
    events = profiler.events() or []
    path = folder / f"trace-rank{rank}.json{'.gz' if len(events) > _LARGE_TRACE_EVENTS else ''}"
    profiler.export_chrome_trace(str(path))
    return path, clock.drain().step_s, read_trace(events, towers, on_host=on_host)


def _count_costs(session: Session, roles: Mapping[str, Role], stream: MicroBatchStream, tracker: ProgressTracker) -> StepCosts:
    """Take one step of which every operation is counted."""
    towers = TowerTracker(session.model, roles)
    costs = StepCosts(lambda: tracker.state.phase, towers)
    with towers, _listening(costs.on_pass), OperationDispatchMode(costs):
        session.step(stream, tracker)
    return costs


def _runs_compiled_flex(cell: Cell, device: torch.device) -> bool:
    return cell.attention == "flex" and device.type == "cuda"


def _unseen_bytes(cell: Cell, device: torch.device) -> dict[str, str]:
    """Return the phases that move bytes in something other than operations of torch, and why these are not seen."""
    reasons = {}
    if cell.compile != "off":
        reasons = dict.fromkeys(_COMPILED_PHASES, _FUSED)
    elif _runs_compiled_flex(cell, device):
        reasons = dict.fromkeys(_COMPILED_PHASES, _FLEX.format("bytes"))
    if device.type == "cuda" and recipe_by_name(cell.recipe).optimizer != TORCH_ADAMW:
        reasons["optimizer"] = _KERNELS.format(cell.recipe)
    return reasons


def _known_bytes(sizes: dict[str, PhaseBytes], unseen: Mapping[str, str]) -> dict[str, PhaseBytes]:
    """Return the bytes by phase, unknown in phases of which some are unseen."""
    return {phase: size | {"read": None, "written": None} if phase in unseen else size for phase, size in sizes.items()}


@contextmanager
def _listening(listener: Callable[[Iterable[Tensor], Iterable[Tensor]], None]) -> Iterator[None]:
    """Let a listener receive compiled passes of optimizers inside the with block."""
    pass_listeners.append(listener)
    try:
        yield
    finally:
        pass_listeners.remove(listener)
