"""The battery continues where it stopped. These tests need no GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from benchbox.plan import plan
from benchbox.spec import load_matrix
from tests.support.scripts import load_script

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent


@pytest.fixture
def battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script(HERE / "battery.py")
    monkeypatch.setattr(module, "WORK", tmp_path)
    return module


def results(battery: ModuleType, sources: str = "a") -> object:
    return battery.Results(battery.WORK / "battery.json", {"sources": sources, "torch": "2", "device": "GPU"})


def python(battery: ModuleType, name: str, code: str, *, is_test: bool = True) -> object:
    return battery.Step(name, (sys.executable, "-c", code), is_test)


def test_a_step_that_ended_is_not_run_again_and_failed_tests_come_last(battery: ModuleType) -> None:
    steps = [
        python(battery, "failing", "exit(1)"),
        python(battery, "passing", ""),
        python(battery, "part", "exit(3)", is_test=False),
    ]
    first = results(battery)
    assert [step.name for step in first.pending(steps)] == ["failing", "passing", "part"]
    for step in steps:
        first.add(step, *battery.execute([step], float("inf")))
    later = [*steps, python(battery, "new", "")]
    assert [step.name for step in results(battery).pending(later)] == ["new", "failing"]
    assert [step.name for step in results(battery, sources="b").pending(later)] == ["failing", "passing", "part", "new"]


def test_a_step_beyond_the_limit_is_stopped_and_counts_as_not_run(battery: ModuleType, tmp_path: Path) -> None:
    """SIGINT stops it, on which `benchbox run` ends its ranks and stays resumable."""
    log = tmp_path / "log"
    code = (
        "import pathlib, time\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "log.write_text('started')\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    log.write_text('interrupted')"
    )
    quick = python(battery, "quick", "")
    slow_ended, quick_ended = battery.execute([python(battery, "slow", code), quick], time.monotonic() + 5)
    assert slow_ended is None
    assert quick_ended.exit_code == 0
    assert log.read_text() == "interrupted"
    assert battery.execute([quick], time.monotonic() - 1) == [None]


def test_the_profile_is_of_one_cell_of_the_matrix(battery: ModuleType) -> None:
    assert len(plan(load_matrix(battery.ROOT / battery.MATRIX), battery.PROFILED).cells) == 1


def test_steps_are_compared_with_lerobot_where_it_is_there(battery: ModuleType, tmp_path: Path, monkeypatch) -> None:
    for folder, names in ((tmp_path / "missing", []), (tmp_path, ["beside lerobot"])):
        monkeypatch.setattr(battery, "LEROBOT", folder)
        assert [step.name for step in battery.all_steps() if "lerobot" in step.name] == names


def test_steps_run_at_once_unless_they_need_the_device_for_themselves(battery: ModuleType, capfd) -> None:
    groups = battery.grouped(battery.all_steps())
    together, *alone = ([step.name for step in group] for group in groups)
    assert {"test_flex_attention", "test_resume"} <= set(together)
    assert all(len(names) == 1 for names in alone)
    expected = {*battery.ALONE, "doctor --peaks", "profile", *map(battery.part_name, battery.PARTS)}
    assert expected == {name for names in alone for name in names}
    wait_for_the_other = "import pathlib, time\n{own}.touch()\nwhile not {other}.exists(): time.sleep(0.05)\nprint('met')"
    first, second = (f"pathlib.Path({str(battery.WORK / name)!r})" for name in "ab")
    steps = [
        python(battery, "one", wait_for_the_other.format(own=first, other=second)),
        python(battery, "two", wait_for_the_other.format(own=second, other=first)),
    ]
    assert [ended.exit_code for ended in battery.execute(steps, time.monotonic() + 60)] == [0, 0]
    assert capfd.readouterr().out.count("met") == 2


def test_outcomes_of_tests_are_read_from_their_report(battery: ModuleType) -> None:
    source = battery.WORK / "test_three.py"
    source.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no')\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(battery.WORK))
    step = battery.Step("three", (*command, "--junitxml", str(battery.junit("three")), str(source)), True)
    (ended,) = battery.execute([step], float("inf"))
    assert ended.exit_code == 1
    assert ended.outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "skipped"}
    first = results(battery)
    first.add(step, ended)
    assert json.loads((battery.WORK / "battery.json").read_text())["steps"]["three"]["outcomes"] == ended.outcomes


def test_every_part_of_the_matrix_is_run(battery: ModuleType) -> None:
    """No cell is in two parts, and none is in no part."""
    from benchbox.plan import plan
    from benchbox.spec import load_matrix

    matrix = load_matrix(HERE.parents[1] / battery.MATRIX, {}, [])
    parts = [plan(matrix, part).cells for part in battery.PARTS]
    assert sorted(cell.cell_id for cells in parts for cell in cells) == sorted(cell.cell_id for cell in plan(matrix).cells)


def test_a_bundle_has_all_requirements_but_those_of_the_machine() -> None:
    bundle = load_script(HERE / "bundle.py")
    pins = bundle.collect_pins("3.12")
    assert {"accelerate", "deepspeed", "av", "pydantic-core", "pytest"} <= set(pins)
    assert not any(name in pins or name.startswith("nvidia-cu") for name in bundle.PRESENT)
    names = {Requirement(line).name.lower().replace(".", "-") for line in bundle.project()["dependencies"]}
    assert names <= set(pins) | bundle.PRESENT
