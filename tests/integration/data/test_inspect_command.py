"""`benchbox data inspect` prints what a dataset contains and what is wrong with it."""

import json

from tests.support.commands import run_in_process
from tests.support.datasets import copy_with_short_video


def benchbox_inspect(root):
    return run_in_process("data", "inspect", root)


def test_problems_are_printed_and_the_exit_code_says_so(dataset_root, tmp_path):
    result = benchbox_inspect(copy_with_short_video(dataset_root, tmp_path / "short"))
    assert result.returncode == 2
    assert "1 problem\n" in result.stdout
    assert "no frame at 3.300 s" in result.stdout


def test_a_folder_that_is_no_dataset_is_one_line(tmp_path):
    result = benchbox_inspect(tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}: not a LeRobot dataset: meta/info.json is missing\n"


def test_the_folder_that_a_command_runs_in_is_no_dataset_in_a_line(tmp_path):
    for folder, line in ((".", "error: .: not a LeRobot dataset: meta/info.json is missing"), ("/", "error: /: not a LeRobot")):
        result = run_in_process("data", "inspect", folder, cwd=tmp_path)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
        assert result.stderr.startswith(line)


def test_inside_an_unfinished_recording_the_line_says_how_to_finish_it(tmp_path):
    folder = tmp_path / "demos.recording"
    folder.mkdir()
    arguments = {"envs": ["metaworld/reach-v3"], "cameras": ["corner"], "episodes": 1, "size": 32, "every": 8, "seed": 0}
    (folder / "arguments.json").write_text(json.dumps(arguments))
    result = run_in_process("data", "inspect", ".", cwd=folder)
    assert result.returncode == 2
    assert f"--out {tmp_path / 'demos'}" in result.stderr
