"""`benchbox noise` by real launches."""

from __future__ import annotations

import math
from statistics import stdev
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_OK
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.metrics import metric_by_name
from benchbox.store.noise import read_noise
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.waiting_policy import write_waiting_policy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

MATRIX = """
name: quick
policy: waiting
size: tiny
backend: single
world_size: 1
data: synthetic
recipe: fp32
batch: 1
measure: {warmup_steps: 1, steps: 1}
"""


def test_the_spread_of_its_launches_is_printed_and_kept_unless_the_host_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tests may run meanwhile: whether the host was busy is read from the records."""
    # Not in the environment of the ranks, who would need a fork server of their own.
    cache = SimpleNamespace(environ={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    monkeypatch.setattr("benchbox.store.machine_cache.os", cache)
    (tmp_path / "m.yaml").write_text(MATRIX)
    policies = write_waiting_policy(tmp_path, tiny=0.02)
    done = run_in_process("noise", "m.yaml", "--policy-dir", policies, "--launches", "10", "--out", "run", cwd=tmp_path)
    records = list(RunStore(tmp_path / "run").records())
    assert [record["status"] for record in records] == ["ok"] * 10
    step_time = metric_by_name("step_time_s")
    sigma = stdev(math.log(step_time.read(record)) for record in records)
    assert f": launches differ by {sigma:.1%} (standard deviation of 10 launches)" in done.stdout
    kept = read_noise(records[0]["environment"]["machine"])
    if any(busy_reasons(record) for record in records):
        assert (done.returncode, kept) == (EXIT_INCONCLUSIVE, {})
    else:
        assert (done.returncode, kept["quick"].sigma) == (EXIT_OK, pytest.approx(sigma))
