"""`benchbox data inspect` prints what a dataset contains and what is wrong with it."""

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
