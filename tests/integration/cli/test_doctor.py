from __future__ import annotations

from benchbox.measure.environment import environment


def test_this_machine_is_fit_and_every_line_shows_its_state_and_detail(benchbox):
    result = benchbox("doctor")
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if "->" not in line]
    assert all(line.split()[0] in {"ok", "warn"} for line in lines)
    assert any(line.split()[1:3] == ["torch", environment()["torch"]] for line in lines)
    assert any(line.split()[1:] == ["gloo", "built", "in"] for line in lines)
