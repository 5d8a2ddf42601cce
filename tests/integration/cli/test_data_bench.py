"""`benchbox data bench` prints rates, costs and a recommendation; a bad argument is one line."""

from __future__ import annotations

import re

import pytest

from benchbox.data.loading.bench import measure_loading
from benchbox.data.sample import sample_path
from tests.support.commands import run_in_process
from tests.support.foreign import write_adapted_policy


def test_the_command_prints_rates_costs_and_a_recommendation(benchbox, monkeypatch):
    measured = []

    def measure(data, spec, *, batch, **options):
        measured.append((data.block, data.buffer, batch))
        return measure_loading(data, spec, batch=batch, **options)

    monkeypatch.setattr("benchbox.data.loading.bench.measure_loading", measure)
    options = ("--seconds", "0.1", "--workers", "0,1", "--block", "32", "--buffer", "64", "--batch", "4")
    done = benchbox("data", "bench", str(sample_path()), *options)
    assert done.returncode == 0, done.stderr
    assert measured == [(32, 64, 4)]
    assert len(re.findall(r"^(?:frame|episode)_shuffle +[01] +\d+$", done.stdout, re.MULTILINE)) == 4
    assert re.search(r"episode_shuffle: 1\.\d\d frames decoded per frame used", done.stdout)
    assert len(re.findall(r"recommended data: \{workers: \d\}", done.stdout)) == 2
    for order in ("frame_shuffle", "episode_shuffle"):
        rate = float(re.search(rf"^{order} +0 +(\d+)$", done.stdout, re.MULTILINE)[1])
        costs = re.search(rf"^{order}: microseconds of a sample .*: (.*)$", done.stdout, re.MULTILINE)[1]
        cost_s = sum(float(cost.split()[1]) for cost in costs.split(", ") if not cost.startswith("transport")) / 1e6
        assert 0.2 < rate * cost_s < 5, "two measurements of one thing"


def test_a_policy_of_a_module_that_cannot_switch_its_attention_is_read_for(tmp_path):
    """Nor can it be built on the meta device."""
    write_adapted_policy(tmp_path)
    options = ("--policy", "adapted", "--policy-dir", tmp_path, "--workers", "0", "--seconds", "0.1", "--order", "sequential")
    done = run_in_process("data", "bench", str(sample_path()), *options)
    assert done.returncode == 0, done.stderr
    assert "sequential" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--order", "frames"], "--order: unknown order 'frames'"),
        (["--workers", "two"], "--workers: 'two' is not a list of numbers from 0 to 64; write 0,1,2"),
        (["--policy", "pi5"], "unknown policy 'pi5'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments, line):
    done = run_in_process("data", "bench", str(sample_path()), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {line}")
    assert len(done.stderr.splitlines()) == 1
