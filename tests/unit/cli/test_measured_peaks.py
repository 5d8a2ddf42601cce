"""Text of `benchbox doctor --peaks` on measured peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.cli.peaks import measure_and_keep_peaks
from tests.support.peaks import made_up_peaks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_warning_of_an_uncertain_peak_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = made_up_peaks()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("benchbox.launch.peaks.measure_peaks", lambda *_, **__: peaks)
    measure_and_keep_peaks("a-machine", 2)
    assert "warning:" not in capsys.readouterr().out
    peaks.matmul["float32"]["thin"]["spread"] = 0.43
    peaks.copy["spread"] = 0.2
    measure_and_keep_peaks("a-machine", 2)
    warning = (
        "warning: repetitions differ in float32 thin by 43%, copy by 20%: measure again when nothing else runs on this machine"
    )
    assert warning in capsys.readouterr().out
