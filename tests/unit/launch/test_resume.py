"""Selection of the launches that are still to be run."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from benchbox.launch import resume
from benchbox.launch.fingerprint import benchbox_sha256, policy_sha256
from benchbox.registry.policies import policy_entry
from benchbox.store.run import RunStore
from tests.support.example_run import example_record, example_run
from tests.support.launchers import MEASURE, cell

if TYPE_CHECKING:
    from benchbox.registry.launch_record import LaunchRecord


def test_a_plan_of_many_cells_reads_the_sources_of_each_policy_once(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of cells waited minutes for their first launch when every cell read them."""
    policies = []
    original = resume.policy_sha256
    monkeypatch.setattr(resume, "policy_sha256", lambda name, folders: policies.append(name) or original(name, folders))
    launches = [(replace(cell("healthy"), seed=seed), 1) for seed in range(20)]
    pending = resume.pending_launches(launches, MEASURE, RunStore(tmp_path / "run"), [policy_dir], fresh=False)
    assert pending.launches == launches
    assert policies == ["stand_in"]


@pytest.mark.parametrize(
    ("fingerprint", "reason"),
    [
        ({"benchbox_sha256": "0" * 64}, "benchbox itself has changed since"),
        ({}, "an older benchbox measured it"),
    ],
)
def test_a_record_of_another_benchbox_is_measured_again(
    fingerprint: dict[str, str], reason: str, policy_dir: Path, tmp_path: Path
) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps}
    current = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}

    def pending(environment: dict[str, str]) -> resume.PendingLaunches:
        store.write_record(cast("LaunchRecord", {**record, "environment": environment}))
        return resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)

    assert pending(current).reused == 1
    outdated = pending({"policy_sha256": current["policy_sha256"], **fingerprint})
    assert (outdated.reused, outdated.notes) == (0, [f"measuring 1 launch again: {reason}"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "oom"}, "it ended oom last time"),
        ({"warmup_steps": 7}, f"{MEASURE.steps} steps after 7 of warm-up were measured, and "),
        ({"steps": 9}, f"9 steps after {MEASURE.warmup_steps} of warm-up were measured, and "),
        ({"policy_sha256": "0" * 64}, "the sources of policy stand_in have changed since"),
    ],
)
def test_a_record_that_differs_in_one_thing_from_what_is_asked_for_is_measured_again(
    change: dict[str, object], reason: str, policy_dir: Path, tmp_path: Path
) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    sources = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps}
    record["environment"] = sources | {key: value for key, value in change.items() if key in sources}
    record |= {key: value for key, value in change.items() if key not in sources}
    store.write_record(cast("LaunchRecord", record))
    pending = resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)
    assert (pending.launches, pending.reused) == ([(healthy, 1)], 0)
    assert pending.notes[0].startswith(f"measuring 1 launch again: {reason}")


def test_a_record_that_was_edited_after_it_was_measured_is_measured_again(policy_dir: Path, tmp_path: Path) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    sources = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps, "environment": sources}
    path = store.write_record(cast("LaunchRecord", record))

    def pending() -> resume.PendingLaunches:
        return resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)

    assert pending().reused == 1
    path.write_text(path.read_text().replace('"duration_s": 14.2', '"duration_s": 7.1'))
    assert pending().notes == ["measuring 1 launch again: its record is not the last one that was measured"]


@pytest.mark.parametrize("status", ["ok", "crash"])
def test_further_launches_that_are_outdated_are_removed_and_others_stay(policy_dir: Path, tmp_path: Path, status: str) -> None:
    """They would be among the figures of the cell. A failure stays one, also where fewer launches are asked for."""
    store, healthy, other = RunStore(tmp_path / "run"), cell("healthy"), replace(cell("healthy"), seed=9)
    store.write_run(example_run([healthy, other]))
    environment = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}
    steps = {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps, "environment": environment}
    for launch, changes in ((1, {}), (2, {"steps": 99}), (3, {"steps": 99, "status": status}), (4, {"status": status})):
        store.write_record(cast("LaunchRecord", example_record(healthy, launch) | steps | changes))
    store.write_record(cast("LaunchRecord", example_record(other, 3) | steps | {"steps": 99}))
    asked = [(healthy, 1), (healthy, 2)]

    def removed() -> str | None:
        return resume.remove_outdated_launches(asked, MEASURE, store, [policy_dir])

    def kept() -> list[tuple[str, int]]:
        return [(record["cell_id"], record["launch"]) for record in store.records()]

    note = "removing 1 further launch, which an earlier command measured"
    assert removed() == note
    assert kept() == [*((healthy.cell_id, launch) for launch in (1, 2, 4)), (other.cell_id, 3)]
    assert removed() is None


def test_of_other_policies_not_even_the_presets_are_read(policy_dir: Path) -> None:
    broken = policy_dir / "another"
    broken.mkdir()
    (broken / "policy.py").touch()
    (broken / "presets.yaml").write_text("tiny: [")
    assert policy_entry("stand_in", [policy_dir]).presets == {"tiny": {}}
