"""`benchbox.run` with arguments that the command refuses, which runs in the process of the test."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING, Any, Self

import pytest

import benchbox
from benchbox.errors import ConfigurationError
from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = """\
name: api
policy: pi05
size: tiny
backend: single
world_size: 1
data: synthetic
axes: {batch: [1, 2]}
"""


class FinishedCommand:
    """In place of a process: the command has run, and what it printed can be read."""

    def __init__(self, command: list[str], **streams: Any) -> None:
        assert streams == {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = run_in_process(*command[3:])
        self.returncode = done.returncode
        self.stdout = io.StringIO(done.stdout + done.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchbox.api.commands.subprocess.Popen", FinishedCommand)


def test_a_wrong_matrix_raises_what_the_command_says(tmp_path: Path) -> None:
    matrix = tmp_path / "api.yaml"
    matrix.write_text(MATRIX.replace("tiny", "tny"))
    with pytest.raises(ConfigurationError, match=r"api.yaml:3:7: .*tny"):
        benchbox.run(matrix, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"size": "tiny,batch=3"}}, r"unknown size 'tiny,batch=3'"),
        ({"overrides": {"policy": "it's, mine"}}, r"unknown policy \"it's, mine\""),
        ({"only": "batch=9"}, "no cell has batch 9"),
        ({"options": "--bogus"}, "No such option:? '?--bogus"),
        ({"launches": 0}, "^launches=0: give 1 or more$"),
        ({"launches": "auto", "only": "batch=9"}, "no cell has batch 9"),
        ({"launches": "many"}, "^--launches many: is no number of launches"),
        ({"options": "--out elsewhere"}, "^options --out: is not read from there; write out=...$"),
        ({"options": ["--out=elsewhere"]}, "^options --out: is not read from there; write out=...$"),
        ({"options": "--only 'batch"}, "^options --only 'batch: No closing quotation$"),
        ({"options": ["--launches", "0"]}, "^--launches 0: is no number of launches; give 1 or more, or auto$"),
        ({"options": "--launches 0 --no-estimate"}, "^--launches 0: is no number of launches; give 1 or more, or auto$"),
        ({"options": ["--launches", "many"]}, "^--launches many: is no number of launches"),
        ({"policy_dirs": "nowhere", "only": "batch=9"}, "no cell has batch 9"),
    ],
)
def test_arguments_reach_the_command_and_a_text_is_one_value_whatever_characters_it_has(
    tmp_path: Path, arguments: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override is not split at its commas, and one text in place of a list not into its characters.

    What is wrong is raised, and not printed as well.
    """
    matrix = tmp_path / "api.yaml"
    matrix.write_text(MATRIX)
    with pytest.raises(ConfigurationError, match=message):
        benchbox.run(matrix, out=tmp_path / "run", **arguments)
    assert "rror: " not in capsys.readouterr().out
