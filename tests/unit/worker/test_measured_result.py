"""The result of a rank holds what was observed and counted, also where that differs from the request.

One measurement in this process, of a cell that gets another policy and other batches than it asks for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.data import open_dataset
from benchbox.data.sample import sample_path
from benchbox.data.video.decoders import choose_decoder
from benchbox.errors import MismatchError
from benchbox.measure.phases import ProgressTracker
from benchbox.registry.phases import PHASES
from benchbox.session import Session, build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell, DataSpec, MeasureSpec, OptimSpec
from benchbox.spec.optim import SpikeSpec
from benchbox.store.events import EventWriter
from benchbox.store.files import read_json
from benchbox.worker import measuring
from benchbox.worker.measuring import measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.registry.contracts import Batch

CELL = Cell(
    policy="pi05",
    size="tiny",
    backend="ddp",
    world_size=2,
    batch=3,
    recipe="fp32",
    attention="sdpa",
    checkpointing=False,
    data=DataSpec(kind="sample", workers=0),
)
MEASURE = MeasureSpec(warmup_steps=1, steps=1, launches=1)


@dataclass
class Measurement:
    """The error that ended it, the result in its file, the steps taken at each reset of the peak, and the checked backends."""

    error: Exception
    result: dict[str, Any]
    steps_at_resets: list[int]
    checked_backends: list[str]


@pytest.fixture(scope="module")
def measurement(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """Measure a cell that asks for DDP, batches of three and sdpa, and gets one process, one sample and eager.

    Actions of the first step are NaN, and spikes are skipped.
    """
    folder = tmp_path_factory.mktemp("rank")
    actual = replace(CELL, backend="single", world_size=1, batch=1, attention="eager", checkpointing=True)
    actual = replace(actual, optim=OptimSpec(spike=SpikeSpec()))
    job: Any = {"cell": CELL.to_dict(), "measure": asdict(MEASURE), "policy_dirs": [], "launch": 1}
    tracker, events = ProgressTracker(), EventWriter(folder / "events", 0)
    steps, steps_at_resets, checked_backends = [0], [], []

    def count_step(session: Session, batches: Iterator[Batch], *more: Any) -> Any:
        if not steps[0]:
            batch = next(batches)
            batches = iter([batch | {"action": batch["action"] * float("nan")}])
        steps[0] += 1
        return take_step(session, batches, *more)

    with pytest.MonkeyPatch.context() as patch:
        take_step = Session.step
        patch.setattr(Session, "step", count_step)
        patch.setattr(measuring, "build_cell_policy", lambda _, directories: build_cell_policy(actual, directories))
        patch.setattr(measuring, "open_cell_data", lambda _, *arguments: open_cell_data(actual, *arguments))
        patch.setattr(measuring, "build_session", lambda _, *arguments: build_session(actual, *arguments))
        patch.setattr(measuring, "check_backend", lambda _, observed: checked_backends.append(observed.backend))
        patch.setattr(measuring, "reset_peak_memory", lambda _: steps_at_resets.append(steps[0]))
        with pytest.raises(MismatchError) as raised:
            measure(job, folder, 0, tracker, events)
    events.close()
    return Measurement(raised.value, read_json(folder / "rank0.json"), steps_at_resets, checked_backends)


def test_the_decoder_of_videos_is_the_one_that_the_stream_used(measurement: Measurement) -> None:
    """The choice of the test's own process: of the decoders installed, the one measured or cached for the shipped dataset."""
    assert measurement.result["observed"]["video_decoder"] == choose_decoder(open_dataset(sample_path()).metadata)


def test_the_kernel_and_the_recomputed_modules_are_those_that_ran(measurement: Measurement) -> None:
    observed = measurement.result["observed"]
    assert observed["attention_kernel"] == "eager"
    assert observed["checkpointed_modules"] > 0
    assert all(kernels == ["eager"] for kernels in observed["attention_sites"].values())


def test_the_backend_and_its_ranks_are_observed_and_compared_with_the_request(measurement: Measurement) -> None:
    observed = measurement.result["observed"]
    assert (observed["backend"], observed["world_size"]) == ("single", 1)
    assert measurement.checked_backends == ["single"]


def test_losses_and_norms_are_those_of_every_step_from_the_first_of_the_warm_up(measurement: Measurement) -> None:
    steps = MEASURE.warmup_steps + MEASURE.steps
    assert (len(measurement.result["loss"]), len(measurement.result["grad_norm"])) == (steps, steps)
    assert len(measurement.result["step_time_s"]) == MEASURE.steps


def test_a_step_without_a_finite_norm_that_was_skipped_as_configured_is_counted_and_the_others_are_measured(
    measurement: Measurement,
) -> None:
    result = measurement.result
    assert result["skipped_steps"] == [0]
    assert (result["loss"][0], result["grad_norm"][0]) == (None, None), "JSON has no NaN"
    assert result["loss"][1] > 0


def test_a_step_that_ran_another_kernel_than_requested_is_a_mismatch(measurement: Measurement) -> None:
    assert str(measurement.error) == "requested sdpa attention, observed eager"


def test_samples_are_those_that_the_measured_steps_consumed(measurement: Measurement) -> None:
    assert measurement.result["samples"] == 1


def test_peaks_of_memory_are_reset_between_the_warm_up_and_the_measured_steps(measurement: Measurement) -> None:
    assert measurement.steps_at_resets == [MEASURE.warmup_steps]


def test_every_phase_of_a_backend_that_fuses_none_is_timed(measurement: Measurement) -> None:
    assert set(measurement.result["phases_s"]) == set(PHASES) - {"average"}  # there are no averages
    assert min(measurement.result["phases_s"]["data_wait"]) > 0
