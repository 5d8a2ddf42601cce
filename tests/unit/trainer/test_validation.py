"""Validations of one process: when they are due, what they write, and what they leave alone."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import pytest
import torch

from benchbox.data.loading.loader import open_samples
from benchbox.errors import ConfigurationError, NonFiniteError
from benchbox.measure.phases import ProgressTracker
from benchbox.registry.contracts import BatchSpec, Losses
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.train import BestSection
from benchbox.spec.validation_section import ValidationSection
from benchbox.trainer.trackers.fan_out import Trackers
from benchbox.trainer.validation import Validation, ValidationPass
from tests.support.datasets import write_robot
from tests.support.small_session import SmallSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

SPEC = BatchSpec(cameras=1, image_size=(16, 16), state_dim=3, action_dim=2, horizon=4, prompt_tokens=48, text_vocab=300)


class NoisySession(SmallSession):
    """The loss of a sample is the square of its noise plus an offset, which is 1 more inside `averaged_weights`."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.samples: list[tuple[int, int]] = []

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.offset += 1.0
        yield
        self.offset -= 1.0

    def evaluate(self, batch: dict[str, torch.Tensor]) -> Losses:
        assert not self.model.training
        self.samples += zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True)
        losses = batch["noise"].square().mean(dim=(1, 2, 3)) + self.offset
        terms = {"noise": (losses, torch.ones_like(losses)), "rare": (losses, torch.zeros_like(losses))}
        return Losses(losses.mean(), {"accuracy": losses.mean() / 10}, terms, sample_losses=losses)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_robot(tmp_path_factory.mktemp("data") / "robot", cameras={"top": (16, 16)}, lengths=(4, 3, 5, 2))


@pytest.fixture
def validation(root: Path, tmp_path: Path) -> Callable[..., Validation]:
    def build(*, share: float = 0.5, workers: int = 0, start: int = 0, **options: Any) -> Validation:
        data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(root)),), validation=share, workers=workers)
        cell = Cell(policy="small", size="tiny", backend="single", world_size=1, batch=2, data=data)
        tracker = options.pop("tracker", ProgressTracker("train"))
        best = BestSection(**options.pop("best", {}))
        section = ValidationSection(**{"every": 3, **options})
        one_pass = ValidationPass(section, cell, open_samples(data, SPEC, 0), rank=0, tracker=tracker)
        return Validation(section, one_pass, path=tmp_path / "validation.jsonl", start=start, is_writer=True, best=best)

    return build


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def test_it_is_due_at_intervals_at_the_end_and_at_the_start_on_request(validation: Callable[..., Validation]) -> None:
    quiet, eager = validation(), validation(at_start=True)
    assert [step for step in range(8) if quiet.is_due(step, last=step == 7)] == [3, 6, 7]
    assert [step for step in range(8) if eager.is_due(step, last=step == 7)] == [0, 3, 6, 7]


def test_every_validation_has_the_same_samples_with_the_same_noise(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    session = NoisySession()
    once = validation()
    losses = [once.run(session, step) for step in (3, 6)]
    losses.append(validation(workers=1, batch=100, start=6).run(session, 7))
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert [row["step"] for row in rows(tmp_path)] == [3, 6, 7]
    assert [row["loss"] for row in rows(tmp_path)] == losses
    number = rows(tmp_path)[0]["samples"]
    first, second, third = (session.samples[start * number : (start + 1) * number] for start in range(3))
    assert first == second == third
    assert len(set(first)) == number


def test_the_noise_is_of_an_epoch_that_no_training_arrives_at(validation: Callable[..., Validation]) -> None:
    session = NoisySession()
    own = validation()
    loss = own.run(session, 3)
    (planned,) = {key.epoch for batch in own._pass._batches for key in batch.keys}
    keys = [key for batch in own._pass._batches for key in batch.keys]
    samples = [own._pass._samples.sample(0, key.index) for key in keys]
    in_training = torch.stack([sample["noise"].square().mean() for sample in samples]).mean()
    assert loss != pytest.approx(float(in_training), rel=1e-3)
    assert planned > 10**9


def test_loader_processes_end_with_the_validation(validation: Callable[..., Validation]) -> None:
    before = set(psutil.Process().children(recursive=True))
    started: set[psutil.Process] = set()

    class Watching(NoisySession):
        def evaluate(self, batch: dict[str, torch.Tensor]) -> Losses:
            started.update(set(psutil.Process().children(recursive=True)) - before)
            return super().evaluate(batch)

    validation(workers=2).run(Watching(), 3)
    assert len(started) >= 2
    assert not set(psutil.Process().children(recursive=True)) & started


def test_a_validation_that_is_asked_to_stop_is_abandoned_before_the_next_batch_without_a_row(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    session, tracker, answers = NoisySession(), ProgressTracker("train"), iter([False, True])
    score = validation(tracker=tracker, batch=1, weights="averages").run(session, 3, lambda: next(answers))
    assert score is None
    assert len(session.samples) == 1
    assert not (tmp_path / "validation.jsonl").exists()
    assert session.model.training
    assert session.offset == 0.0, "the model has its own weights again"
    assert tracker.state.stage == "train"


def test_progress_is_reported_as_batches_of_a_stage_and_training_continues_in_its_own(
    validation: Callable[..., Validation],
) -> None:
    states = []
    tracker = ProgressTracker("train", on_change=states.append)
    own = validation(tracker=tracker)
    own.run(NoisySession(), 3)
    steps = [state.step for state in states if state.stage == "validate" and state.phase == "forward"]
    assert steps == list(range(1, len(own._pass._batches) + 1))
    assert {state.of for state in states if state.stage == "validate"} == {len(own._pass._batches)}
    assert tracker.state.stage == "train"


def test_rows_of_steps_that_are_repeated_after_an_interruption_are_removed(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    interrupted = validation()
    for step in (3, 6, 9):
        interrupted.run(NoisySession(), step)
    resumed = validation(start=6)
    assert [row["step"] for row in rows(tmp_path)] == [3, 6], "the row of the checkpoint itself is not repeated"
    resumed.run(NoisySession(), 9)
    assert [row["step"] for row in rows(tmp_path)] == [3, 6, 9]


def test_a_training_that_begins_again_has_one_row_of_its_start(validation: Callable[..., Validation], tmp_path: Path) -> None:
    """An interrupted validation left a part of a row behind it."""
    (tmp_path / "validation.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 3, "lo')
    validation(start=0)
    assert rows(tmp_path) == []


def test_a_loss_that_is_not_finite_ends_the_training_after_its_row(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError, match="validation after 3 steps: loss is inf"):
        validation().run(NoisySession(offset=float("inf")), 3)
    assert rows(tmp_path)[0]["loss"] is None
    assert "Infinity" not in (tmp_path / "validation.jsonl").read_text(), "it is no JSON"


def test_the_score_of_a_checkpoint_is_the_metric_that_keep_best_names(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    """A term, a part such as an accuracy, of which the highest values are the best, or by default the loss."""
    session = NoisySession()
    bests = ({}, {"metric": "noise"}, {"metric": "accuracy"}, {"metric": "accuracy", "mode": "max"})
    scores = [validation(best=best).run(session, 3) for best in bests]
    row = rows(tmp_path)[-1]
    accuracy = row["parts"]["accuracy"]
    assert scores == [row["loss"], row["terms"]["noise"], accuracy, -accuracy]
    assert accuracy == pytest.approx(row["loss"] / 10)


def test_a_metric_that_the_policy_does_not_have_is_refused_after_the_first_step(validation: Callable[..., Validation]) -> None:
    own = validation(best={"metric": "accurracy"})
    with pytest.raises(ConfigurationError, match=r"keep_best.metric: the validation has no metric 'accurracy'; did you mean"):
        own.check_metric(["noise", "rare", "accuracy"])
    validation(best={"metric": "rare"}).check_metric(["noise", "rare", "accuracy"])


def test_a_metric_that_no_validation_sample_has_is_refused_after_the_row_is_written(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    own = validation(best={"metric": "rare"})
    own.check_score()
    assert own.run(NoisySession(), 3) is None
    assert [row["step"] for row in rows(tmp_path)] == [3]
    with pytest.raises(ConfigurationError, match="no validation sample has 'rare': write another metric, and continue with"):
        own.check_score()


def test_averages_are_validated_in_place_of_the_weights(validation: Callable[..., Validation], tmp_path: Path) -> None:
    session = NoisySession()
    trained = validation().run(session, 3)
    averages = validation(weights="averages", start=3).run(session, 3)
    assert averages == pytest.approx(trained + 1.0)
    assert [row["evaluated_weights"] for row in rows(tmp_path)] == ["trained", "averages"]
    assert session.offset == 0.0


def test_trackers_get_loss_terms_and_parts_at_the_step_that_the_validation_follows(
    validation: Callable[..., Validation], tmp_path: Path
) -> None:
    class ListTracker:
        logged: ClassVar[list[tuple[int, Mapping[str, float]]]] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.logged.append((step, values))

        def close(self) -> None: ...

    own = validation(at_start=True)
    own.trackers = Trackers({"list": ListTracker()})
    for step in (0, 3):
        own.run(NoisySession(), step)
    values = [{"loss": row["loss"], "noise": row["loss"], "accuracy": row["parts"]["accuracy"]} for row in rows(tmp_path)]
    assert ListTracker.logged == [
        (step, {f"validation/{name}": value for name, value in row.items()}) for step, row in zip((0, 2), values, strict=True)
    ]


def test_a_share_of_data_without_a_second_episode_is_refused(tmp_path: Path, validation: Callable[..., Validation]) -> None:
    with pytest.raises(ConfigurationError, match=r"validation.every: no dataset has a validation episode; a dataset needs two"):
        validation(share=0.0)
