"""Launches of an earlier command that asked for more: they stay among the figures only if this one could reuse them."""

from __future__ import annotations

import pytest

from benchbox.launch.fingerprint import benchbox_sha256, policy_sha256
from benchbox.launch.runner import RunSummary
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.example_run import steady_records

ONE_CELL = ("backends", "--only", "backend=ddp")  # of a shipped matrix


@pytest.mark.parametrize("command", [("run", *ONE_CELL, "--no-estimate"), ("noise", *ONE_CELL)])
@pytest.mark.parametrize(("options", "kept"), [((), 13), (("--set", "measure.steps=3"), 12)])
def test_further_launches_of_other_steps_are_not_among_the_figures(tmp_path, monkeypatch, command, options, kept):
    sources = {"benchbox_sha256": benchbox_sha256(), "policy_sha256": policy_sha256("pi05")}

    def launch(launches, *, store, measure, **_):
        for cell, number in launches:
            record = steady_records(cell, step_s=0.2, launches=number)[-1]
            record["environment"] = {**record["environment"], **sources}
            store.write_record(record | {"steps": measure.steps, "warmup_steps": measure.warmup_steps})
        return RunSummary()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in ("cli.run_here", "launch.runner"):  # of `run`, and of `noise`
        monkeypatch.setattr(f"benchbox.{module}.run_matrix", launch)
    first = run_in_process(*command, "--out", "run", "--launches", "13", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = run_in_process(*command, "--out", "run", "--launches", "12", *options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(list(RunStore(tmp_path / "run").records())) == kept
    assert ("removing 1 further launch" in again.stdout) == (kept == 12)
