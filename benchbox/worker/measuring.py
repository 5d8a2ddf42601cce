"""The `measure` job of a rank: warm up, time steps, observe further steps that are not timed, and write the results."""

from __future__ import annotations

import math
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from benchbox.audit.record import facts_file
from benchbox.audit.subjects.session import observe_session
from benchbox.errors import NonFiniteError, UnsupportedError
from benchbox.measure.batch_sizes import SizedBatches
from benchbox.measure.collective_times import CollectiveClock, enable_recording
from benchbox.measure.compilation import CompilationWatch
from benchbox.measure.environment import environment
from benchbox.measure.host import HostWindow
from benchbox.measure.memory import limit_memory, peak_memory, reset_peak_memory
from benchbox.measure.outlines import OutlinedBatches
from benchbox.measure.phases import CombinedInstrument, PhaseClock
from benchbox.measure.probe import StepProbe
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, copy_meta_policy, open_cell_data
from benchbox.session.construction import construction_of
from benchbox.session.host_memory import check_host_memory
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.files import write_json
from benchbox.worker.expected import check_backend, check_compilation, check_micro_batches, check_step
from benchbox.worker.reporting import Reporter
from benchbox.worker.step_flops import mean_flops, probed_flops
from benchbox.worker.steps import run_steps, synchronize_ranks, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchbox.measure.phases import ProgressTracker
    from benchbox.registry.launch_record import WeightsRecord
    from benchbox.session import StepResult
    from benchbox.store.events import EventWriter
    from benchbox.store.rank_result import RankResult
    from benchbox.worker.job_file import MeasureJob

_UNCHECKED_REASON = (
    "the steps were timed, but the probe after them did not complete: attention kernel, checkpointing and dtypes were not "
    "checked against the request"
)


def measure(job: MeasureJob, out: Path, rank: int, tracker: ProgressTracker, events: EventWriter) -> None:
    """Write `rank<r>.json`, the result of this rank, and `facts-rank<r>.json`, the input of the audit.

    The result is written twice: with the timed steps before the probe, and complete after it.

    Raises:
        MismatchError: what runs is not what was requested.
        NonFiniteError: a loss or gradient norm is not finite, and the step was not skipped.
        UnsupportedError: the machine has too little memory, or a memory limit is on a device without counters, where compiled
            code allocates unseen.
    """
    variables = dict(os.environ)  # those of the user and the launcher, before libraries add theirs
    cell, spec = Cell.from_dict(job["cell"]), MeasureSpec(**job["measure"])
    reporter = Reporter(tracker, events)
    reporter.enter_stage("build")
    enable_recording()
    policy_dirs = [Path(directory) for directory in job["policy_dirs"]]
    policy = build_cell_policy(cell, policy_dirs)
    check_host_memory(cell, policy)
    meta_policy, units, construction = copy_meta_policy(cell, policy), policy.layer_units(), construction_of(policy)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        reporter.enter_stage("prepare")
        session = build_session(cell, policy, stream.statistics, reporter.enter_stage)
        observed = session.backend.observe()
        check_backend(cell, observed)
        device = session.device
        if cell.compile != "off" and spec.memory_limit is not None and device.type != "cuda":
            raise UnsupportedError(f"a memory limit on a {device.type} counts tensors of operations: write compile: off")

        reporter.enter_stage("warmup", spec.warmup_steps)
        compilation = CompilationWatch(tracker, cell.compile)
        with compilation, limit_memory(session.model, device, spec.memory_limit):
            warmup = warm_up(session, stream, spec.warmup_steps, tracker, reporter)
        host = HostWindow(device)
        synchronize_ranks(device)  # no rank begins its first step while another one still reads the host
        reset_peak_memory(device)

        reporter.enter_stage("measure", spec.steps)
        clock, collectives = PhaseClock(device), CollectiveClock(device)
        sized = SizedBatches(stream, stream.spec)
        outlined = OutlinedBatches(sized) if cell.padding != "full" else None  # then steps differ in shape
        batches = sized if outlined is None else outlined
        with compilation.of_measured_steps(), collectives:
            measured = run_steps(session, batches, spec.steps, CombinedInstrument(collectives, clock, tracker), reporter)
        times = clock.drain()
        host_use = host.close(rank)
        sizes, sizes_reason = sized.result()
        collective_times, collective_times_reason = collectives.result()
        device_memory = peak_memory(device)
        results = [*warmup, *measured]
        result_file = out / f"rank{rank}.json"
        timed: RankResult = {
            "rank": rank,
            "world_size": cell.world_size,
            "observed": {
                "backend": observed.backend,
                "model_class": observed.model_class,
                "optimizer_chain": observed.optimizer_chain,
                "sharding": observed.sharding,
                "shard_numel": observed.shard_numel,
                "trainable_numel": observed.trainable_numel,
                "total_numel": observed.total_numel,
                "world_size": observed.world_size,
                "device": observed.device,
                "video_decoder": stream.decoder,
                "micro_batch_sizes": sizes,
                "micro_batch_sizes_reason": sizes_reason,
                "settings": observed.settings,
                "attention_kernel": None,
                "checkpointed_modules": None,
                "construction": construction.how,
                "unused_parameters": None if construction.unused is None else list(construction.unused),
                "unused_parameters_reason": construction.unused_reason,
                "weights": None if session.loaded is None else cast("WeightsRecord", session.loaded.to_dict()),
            },
            "step_time_s": times.step_s,
            "phases_s": times.phases_s,
            "fused_phases": session.backend.fused_phases,
            "samples": sum(result.samples for result in measured),
            "loss": _read_finite("loss", results, lambda result: result.loss),
            "grad_norm": _read_finite("grad_norm", results, lambda result: result.grad_norm),
            "skipped_steps": [step for step, result in enumerate(results) if result.skipped],
            "memory": device_memory,
            "collectives": None,
            "flops": None,
            "compilation": compilation.record(),
            "mfu": None,
            "hfu": None,
            "mfu_reason": "the probe, which counts FLOPs, did not complete",
            "host": host_use,
            "collective_times": collective_times,
            "collective_times_reason": collective_times_reason,
            "data": stream.data_use.record(),
            "unchecked_reason": _UNCHECKED_REASON,
            "environment": environment(variables),
            "config": cell.to_dict(),
        }
        write_json(result_file, timed, indent=None)  # before the probe, so that no failure of it costs the measurement

        reporter.enter_stage("probe")
        synchronize_ranks(device)  # a rank that failed here at once would end the others while they still write
        probe = StepProbe(session.model, units, device, is_compiled=cell.compile != "off")
        with compilation:  # a batch may have another length than all before it
            facts = observe_session(session, stream, recipe_by_name(cell.recipe), probe, tracker)
        probed = probe.result()
        memory = device_memory or probed.memory
        assert memory is not None, "the probe measures memory where the device has no counters"

        if outlined is None:
            flops, utilisation = probed_flops(meta_policy, probed, times.step_s, device)
        else:
            flops, utilisation = mean_flops(meta_policy, probed, outlined.outlines, times.step_s, device)

        reporter.enter_stage("write")
        complete: RankResult = {
            **timed,
            "observed": {
                **timed["observed"],
                "attention_kernel": probed.attention_kernel,
                "attention_sites": probed.attention_sites,
                "checkpointed_modules": probed.checkpointed_modules,
            },
            "memory": memory,
            "collectives": probed.collectives,
            "flops": flops,
            **utilisation,
            "unchecked_reason": None,
        }
        write_json(out / facts_file(rank), facts.to_dict(), indent=None)
        write_json(result_file, complete, indent=None)
        # After writing, so that the record of a mismatch shows what was observed.
        check_micro_batches(cell, sizes)
        check_compilation(cell, timed["compilation"])
        check_step(
            cell,
            kernel=probed.attention_kernel,
            sites=probed.attention_sites,
            checkpointed=probed.checkpointed_modules,
            products=facts.products,
            stepped=facts.stepped,
        )


def _read_finite(name: str, results: Sequence[StepResult], value: Callable[[StepResult], Tensor]) -> list[float]:
    """Read one value per step from the device. To be called after the loop, since every read waits for the device.

    A step that `optim.spike` skipped may have any value: no weight has changed by it.

    Raises:
        NonFiniteError: a value of another step is NaN or infinite.
    """
    numbers = [float(value(result)) for result in results]
    for step, (number, result) in enumerate(zip(numbers, results, strict=True)):
        if not math.isfinite(number) and not result.skipped:
            raise NonFiniteError(f"step {step}: {name} is {number}")
    return numbers
