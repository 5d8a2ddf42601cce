"""`benchbox noise` with launches of known speed in place of processes: what it prints, keeps and proposes."""

from __future__ import annotations

import signal

import pytest

from benchbox.analysis.noise import launches_for
from benchbox.errors import EXIT_CELL_FAILED, EXIT_INCONCLUSIVE, EXIT_OK, EXIT_USAGE
from benchbox.launch.runner import RunSummary
from benchbox.launch.supervise.group import never_stop
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

    `host` is the state of the hosts, `spread` the part by which every third launch is slower, and `interrupt` a signal that
    arrives while the launches run.
    """
    (tmp_path / "m.yaml").write_text(MATRIX)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments, host=None, spread=0.0, summary=None, interrupt=None):
        def launch(launches, *, store, stop=never_stop, **_):
            for cell, number in launches:
                step_s = 0.2 * (1 + spread * (number % 3 == 0))
                record = steady_records(cell, step_s=step_s, launches=number)[-1]
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
    first, halves, five, ten, twenty, needed, proposed, path = done.stdout.splitlines()
    assert first == f"{kept.cell}: launches differ by {kept.sigma:.1%} (standard deviation of 12 launches)"
    assert halves.startswith("odd against even launches: 1.00")
    assert halves.endswith(", where 1 is the truth")
    assert [line.partition(": ")[0] for line in (five, ten, twenty)] == [
        f"noise floor with {number} launches" for number in (5, 10, 20)
    ]
    assert needed == "5 launches of each cell settle a difference of 1%"
    assert proposed == "proposed threshold: max_regression: 1%"
    assert path == f"kept in {tmp_path / 'cache' / 'benchbox' / 'noise' / MACHINE}.json"
    run = RunStore(tmp_path / "runs" / "small-noise").run()
    assert (run.name, run.launches, run.reference, run.thresholds) == ("small-noise", 12, {}, [])
    assert [cell["backend"] for cell in run.cells.values()] == ["ddp"]


def test_a_machine_that_scatters_needs_more_launches_and_a_wider_threshold(noise, tmp_path):
    options = ("--only", "backend=zero2", "--resolution", "5%", "--out", "elsewhere")
    done = noise("--launches", "15", *options, spread=0.2)
    assert done.returncode == EXIT_OK, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("backend=zero2 ")
    assert lines[1] == "warning: high spread: measure again on a quiet machine, this floor is high"
    needed, proposed = (int(line.split()[index].rstrip("%")) for line, index in ((lines[-3], 0), (lines[-2], -1)))
    assert needed == launches_for(read_noise(MACHINE)["small"].sigma, 0.05) > 10
    assert proposed > 10
    assert len(list(RunStore(tmp_path / "elsewhere").records())) == 15


def test_noise_of_a_busy_host_is_not_kept(noise):
    done = noise(host=busy_state())
    assert done.returncode == EXIT_INCONCLUSIVE
    assert "warning: busy host: measure again on a quiet machine, this floor is high\n" in done.stdout
    assert done.stdout.endswith("not kept: the host was busy in a launch\n")
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
