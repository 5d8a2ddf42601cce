"""Selection of the launches that are still to be run."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

import pytest
import torch

from benchbox.launch import changed_environment, resume
from benchbox.launch.fingerprint import benchbox_sha256, policy_sha256
from benchbox.measure.environment import environment
from benchbox.registry.policies import policy_entry
from benchbox.store.run import RunStore
from tests.support.example_run import example_record, example_run
from tests.support.launchers import MEASURE, DirectLauncher, cell

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.launch.job import Launcher
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


def test_a_record_of_another_benchbox_is_measured_again(policy_dir: Path, tmp_path: Path) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps}
    current = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}

    def pending(environment: dict[str, str]) -> resume.PendingLaunches:
        store.write_record(cast("LaunchRecord", {**record, "environment": environment}))
        return resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)

    assert pending(current).reused == 1
    outdated = pending(current | {"benchbox_sha256": "0" * 64})
    assert (outdated.reused, outdated.notes) == (0, ["measuring 1 launch again: benchbox itself has changed since"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "oom"}, "it ended oom last time"),
        ({"warmup_steps": 7}, f"{MEASURE.steps} steps after 7 of warm-up were measured, and "),
        ({"memory_limit_bytes": 2**30}, "it was measured under another memory limit"),
        ({"steps": 9}, f"9 steps after {MEASURE.warmup_steps} of warm-up were measured, and "),
        ({"policy_sha256": "0" * 64}, "the sources of policy stand_in have changed since"),
        ({"data_sha256": "0" * 64}, "the metadata of its data, or its tokenizer, have changed since"),
        ({"torch": "2.0.0"}, f"torch was 2.0.0, and is {torch.__version__} now"),
        ({"accelerate": "0.1"}, f"accelerate was 0.1, and is {version('accelerate')} now"),
        ({"deepspeed": "0.1"}, f"deepspeed was 0.1, and is {version('deepspeed')} now"),
    ],
)
def test_a_record_that_differs_in_one_thing_from_what_is_asked_for_is_measured_again(
    change: dict[str, object], reason: str, policy_dir: Path, tmp_path: Path
) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    sources = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps}
    record["environment"] = sources | {key: value for key, value in change.items() if key not in record}
    record |= {key: value for key, value in change.items() if key in record}
    store.write_record(cast("LaunchRecord", record))
    pending = resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)
    assert (pending.launches, pending.reused) == ([(healthy, 1)], 0)
    assert pending.notes[0].startswith(f"measuring 1 launch again: {reason}")


class ReusedLaunch:
    """A launch of the environment of this machine, whose record is reused whatever is changed in it."""

    def __init__(self, folder: Path, policy_dir: Path) -> None:
        self._store, self._policy_dir, self._cell = RunStore(folder), policy_dir, cell("healthy")
        self._environment = {
            **environment(),
            "benchbox_sha256": benchbox_sha256(),
            "policy_sha256": policy_sha256("stand_in", [policy_dir]),
        }

    def notes(self, *, asked: Launcher | None = None, without: str = "", **changes: object) -> list[str]:
        """Return the lines on it, with these values in its environment, where the command asks for a launcher."""
        values = {key: value for key, value in {**self._environment, **changes}.items() if key != without}
        steps = {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps}
        self._store.write_record(cast("LaunchRecord", example_record(self._cell) | steps | {"environment": values}))
        pending = resume.pending_launches([(self._cell, 1)], MEASURE, self._store, [self._policy_dir], launcher=asked)
        assert pending.reused == 1
        return pending.notes


@pytest.fixture
def reused(policy_dir: Path, tmp_path: Path) -> ReusedLaunch:
    return ReusedLaunch(tmp_path / "run", policy_dir)


def test_records_of_this_environment_are_reused_without_a_word_and_those_of_another_machine_with_one(
    reused: ReusedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reused.notes() == []
    (note,) = reused.notes(cpu="Another CPU", cores=96, devices=[])
    assert note.startswith("reusing 1 launch of another machine: they were measured on Another CPU with 96 cores, and this ")
    assert note.endswith("; --fresh repeats them")
    monkeypatch.setattr(changed_environment, "_gpus", lambda: (("NVIDIA H100", "NVIDIA H200"), "580.1"))
    assert reused.notes(devices=["NVIDIA H200 MIG 1g.18gb"], driver="580.1", cpu="Another CPU") == []
    assert "with driver 570.2, and this machine has 580.1" in reused.notes(devices=["NVIDIA H200"], driver="570.2")[0]
    assert "on NVIDIA A100, which this machine does not have" in reused.notes(devices=["NVIDIA A100"], driver="580.1")[0]
    assert reused.notes(without="cpu", cores=96, devices=[]) == [], "what a record does not know is no difference"
    monkeypatch.setattr(changed_environment, "_gpus", lambda: (("NVIDIA H200",), None))
    assert reused.notes(devices=["NVIDIA H200"], driver="570.2") == [], "nor is what this machine does not tell"


def test_launches_by_another_launcher_or_with_other_threads_are_reused_with_a_word(
    reused: ReusedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    direct, not_comparable = DirectLauncher(), "reusing 1 launch not comparable with new ones: they were"
    assert reused.notes(asked=direct, launcher="direct", threads=3) == []
    assert reused.notes(asked=direct, launcher="torchrun", threads=3) == [
        f"{not_comparable} launched by torchrun, and this command launches by direct; --fresh repeats them"
    ]
    assert reused.notes(asked=direct, launcher="direct", threads=1) == [
        f"{not_comparable} measured with OMP_NUM_THREADS=1, which is 3,1 now; --fresh repeats them"
    ]


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


def test_records_that_the_chain_does_not_have_are_reused_with_a_word(policy_dir: Path, tmp_path: Path) -> None:
    store, healthy = RunStore(tmp_path / "run"), cell("healthy")
    sources = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("stand_in", [policy_dir])}
    record = example_record(healthy) | {"warmup_steps": MEASURE.warmup_steps, "steps": MEASURE.steps, "environment": sources}
    store.write_record(cast("LaunchRecord", record))
    store.chain.path.unlink()
    for _ in ("no chain", "one that was begun anew"):
        pending = resume.pending_launches([(healthy, 1)], MEASURE, store, [policy_dir], fresh=False)
        (note,) = pending.notes
        assert note == "reusing 1 launch whose records no intact chain.jsonl has: verify refuses them; --fresh repeats them"
        store.write_run(example_run([healthy]))


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
