"""`benchbox noise` with launches of known speed in place of processes: what it prints, keeps and proposes."""

from __future__ import annotations

import math
import signal
from datetime import UTC, datetime

import pytest

from benchbox.analysis.noise import describe_floor, drift, launches_for, noise_floor, settled_difference
from benchbox.errors import EXIT_CELL_FAILED, EXIT_INCONCLUSIVE, EXIT_OK, EXIT_USAGE
from benchbox.launch.runner import RunSummary
from benchbox.launch.supervise.group import never_stop
from benchbox.store.files import read_json, write_json
from benchbox.store.noise import read_noise
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.example_run import steady_records
from tests.support.host_states import busy_state, quiet_state

MATRIX = """\
name: small
policy: pi05
size: tiny
data: synthetic
world_size: 2
batch: 1
axes: {backend: [ddp, zero2]}
measure: {warmup_steps: 1, steps: 4, launches: 3}
reference: {backend: ddp}
thresholds: [{metric: status, expect: ok}]
"""
MACHINE = "example-cpu-2-cores"


@pytest.fixture
def noise(tmp_path, monkeypatch):
    """Return the command.

    `host` is the state of the hosts, `spread` the part by which every third launch is slower, `day` of January on which the
    launches start, None for now, `crash` the number of the launch that fails, and `interrupt` a signal that arrives while they
    run, after the launch `until`.
    """
    (tmp_path / "m.yaml").write_text(MATRIX)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments, host=None, spread=0.0, summary=None, interrupt=None, until=None, crash=None, day=1, step_s=0.2):
        def launch(launches, *, store, stop=never_stop, **_):
            for cell, number in launches[:until]:
                slower = step_s * (1 + spread * (number % 3 == 0))
                record = steady_records(cell, step_s=slower, launches=number, started=f"2026-01-{day or 1:02}")[-1]
                record["status"] = "crash" if number == crash else "ok"
                if day is None:
                    record["started_at"] = datetime.now(UTC).isoformat()
                store.write_record(record | {"host": host or quiet_state()})
            if interrupt is not None:
                signal.raise_signal(interrupt)
            return summary or RunSummary(stopped=stop())

        monkeypatch.setattr("benchbox.launch.runner.run_matrix", launch)
        return run_in_process("noise", "m.yaml", *arguments, cwd=tmp_path)

    return run


def test_the_noise_of_the_first_cell_is_printed_and_kept_for_its_machine_and_matrix(noise, tmp_path):
    done = noise("--resolution", "1%")
    assert done.returncode == EXIT_OK, done.stderr
    kept = read_noise(MACHINE)["small"]
    assert (kept.launches, kept.cell) == (12, "backend=ddp policy=pi05 batch=1")
    first, halves, five, ten, twenty, needed, between, proposed, path = done.stdout.splitlines()
    assert first == f"{kept.cell}: launches differ by {kept.sigma:.1%} (standard deviation of 12 launches)"
    assert halves.startswith("odd against even launches: 1.00")
    assert halves.endswith(", where 1 is the truth")
    for line, number in ((five, 5), (ten, 10), (twenty, 20)):
        settled = settled_difference(kept.sigma, number)
        assert line == f"{number} launches of each cell settle a difference of {settled:.1%} within a run"
    assert needed == "5 launches of each cell settle that equal ones differ by less than 1%"
    assert between == f"noise floor: {describe_floor(kept, 5)}"
    assert proposed == "proposed threshold: max_regression: 1%"
    assert path == f"kept in {tmp_path / 'cache' / 'benchbox' / 'noise' / MACHINE}.json"
    run = RunStore(tmp_path / "runs" / "small-noise-1").run()
    assert (run.name, run.launches, run.reference, run.thresholds) == ("small-noise", 12, {}, [])
    assert [cell["backend"] for cell in run.cells.values()] == ["ddp"]


def test_every_call_is_a_run_of_its_own_and_four_of_them_show_the_drift_between_runs(noise, tmp_path):
    outputs = [noise(day=day, step_s=0.2 * 1.03**day).stdout.splitlines() for day in range(1, 5)]
    kept = read_noise(MACHINE)["small"]
    assert [kept_run.launches for kept_run in kept.runs] == [12] * 4
    assert [kept_run.mean for kept_run in kept.runs] == pytest.approx(
        [math.log(0.2 * 1.03**day) for day in range(1, 5)], abs=1e-3
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"small-noise-{number}" for number in range(1, 5)]
    apart = drift(kept.runs)
    assert 0.03 < apart < 0.05
    assert f"4 runs within 3.0 days differ by {apart:.1%} (standard deviation) beyond their launches" in outputs[3]
    assert "2 runs within 24.0 hours differ by 2.1% (standard deviation) beyond their launches" in outputs[1]
    floors = [line for lines in outputs for line in lines if line.startswith("noise floor: ")]
    assert [floor.partition(", ")[2] for floor in floors] == [
        *(f"without the drift between runs: {number} of 4 runs" for number in (1, 2, 3)),
        "of 4 runs within 3.0 days",
    ]
    assert outputs[3][-2] == f"proposed threshold: max_regression: {math.ceil(100 * noise_floor(kept, 5))}%"
    assert noise_floor(kept, 5) > 0.3


def test_a_run_that_was_interrupted_or_failed_is_continued_and_another_cell_has_its_own(noise, tmp_path):
    assert noise(interrupt=signal.SIGINT, until=7, day=None).returncode == 130
    failed = noise(crash=12, summary=RunSummary(failed_cells={"a"}), day=None)
    assert failed.returncode == EXIT_CELL_FAILED
    other = noise("--only", "backend=zero2", day=None)
    assert other.returncode == EXIT_OK, other.stderr
    assert noise(day=None).returncode == EXIT_OK
    runs = {path.name: path for path in (tmp_path / "runs").iterdir()}
    backends = {name: [cell["backend"] for cell in RunStore(path).run().cells.values()] for name, path in runs.items()}
    assert backends == {"small-noise-1": ["ddp"], "small-noise-2": ["zero2"]}
    assert [len(list(RunStore(path).records())) for path in runs.values()] == [12, 12]


def test_runs_that_began_long_ago_are_not_continued(noise, tmp_path):
    assert noise(interrupt=signal.SIGINT, until=7).returncode == 130
    assert noise(day=3).returncode == EXIT_OK
    numbers = [len(list(RunStore(tmp_path / "runs" / f"small-noise-{number}").records())) for number in (1, 2)]
    assert numbers == [7, 12]


def test_a_run_of_another_command_in_a_folder_of_that_name_is_left_as_it_is(noise, tmp_path):
    assert noise(interrupt=signal.SIGINT, until=7, day=None).returncode == 130
    store = RunStore(tmp_path / "runs" / "small-noise-1")
    plan = store.path / "run.json"
    write_json(plan, read_json(plan) | {"name": "mine"})
    assert noise(day=None).returncode == EXIT_OK
    assert (store.run().name, len(list(store.records()))) == ("mine", 7)
    assert len(list(RunStore(tmp_path / "runs" / "small-noise-2").records())) == 12


def test_runs_of_something_else_are_named_kept_and_forgotten_when_asked(noise):
    noise("--only", "backend=zero2")
    done = noise(day=2)
    reason = "cell backend=zero2 policy=pi05 batch=1 against backend=ddp policy=pi05 batch=1"
    assert f"1 earlier run is not counted: {reason}" in done.stdout.splitlines()
    longer = noise("--set", "measure.steps=5", day=3)
    assert "2 earlier runs are not counted: steps 4 against 5" in longer.stdout.splitlines()
    kept = read_noise(MACHINE)["small"]
    assert (len(kept.runs), len(kept.other_runs)) == (1, 2)
    fresh = noise("--fresh", day=4)
    assert "not counted" not in fresh.stdout
    kept = read_noise(MACHINE)["small"]
    assert (len(kept.runs), len(kept.other_runs)) == (1, 0)


def test_a_machine_that_scatters_needs_more_launches_and_a_wider_threshold(noise, tmp_path):
    options = ("--only", "backend=zero2", "--resolution", "5%", "--out", "elsewhere")
    done = noise("--launches", "15", *options, spread=0.2)
    assert done.returncode == EXIT_OK, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("backend=zero2 ")
    assert lines[1] == "warning: high spread: measure again on a quiet machine, this floor is high"
    needed, proposed = (int(line.split()[index].rstrip("%")) for line, index in ((lines[6], 0), (lines[-2], -1)))
    assert needed == launches_for(read_noise(MACHINE)["small"].sigma, 0.05) > 10
    assert proposed > 10
    assert len(list(RunStore(tmp_path / "elsewhere").records())) == 15


def test_noise_of_a_busy_host_is_not_kept(noise):
    done = noise(host=busy_state())
    assert done.returncode == EXIT_INCONCLUSIVE
    assert "warning: busy host: measure again on a quiet machine, this floor is high\n" in done.stdout
    assert done.stdout.endswith("not kept: the host was busy in a launch\n")
    assert "noise floor" not in done.stdout, "it is not the one that check uses"
    assert read_noise(MACHINE) == {}


def test_noise_of_launches_that_failed_or_were_stopped_is_not_measured(noise):
    failed = noise(summary=RunSummary(failed_cells={"a"}))
    assert failed.returncode == EXIT_CELL_FAILED
    assert failed.stderr.startswith("error: a launch of backend=ddp policy=pi05 batch=1 did not end ok; ")
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped = noise(interrupt=number)
        assert (stopped.returncode, stopped.stdout, read_noise(MACHINE)) == (130, "", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--launches", "9"), "error: --launches 9: at least 10 are needed to measure noise\n"),
        (("--launches", "1001"), "error: --launches 1001: at most 1000, as `measure.launches` of a matrix\n"),
        (("--resolution", "2"), "error: --resolution: '2' is no percentage; write it as 2%\n"),
        (
            ("--set", "axes.backend=[ddp,zero3],checkpointing=true", "--only", "backend=zero3"),
            "error: m.yaml: no cell can run: zero3 refuses",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(noise, arguments, message):
    refused = noise(*arguments)
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith(message)
    assert refused.stderr.count("\n") == 1
