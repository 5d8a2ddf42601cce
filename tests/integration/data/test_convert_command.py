"""`benchbox data convert` says what it wrote, and refuses in one line."""

from benchbox.data import open_dataset
from benchbox.data.sample import sample_path
from tests.support.commands import run_in_process


def convert(*arguments):
    return run_in_process("data", "convert", *arguments)


def test_a_dataset_is_converted_and_a_second_time_refused(tmp_path):
    target = tmp_path / "v21"
    done = convert(sample_path(), target, "--to", "v2.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {target} as v2.1: 48 videos of episodes copied, 0 encoded again\n"
    assert len(open_dataset(target)) == 373
    again = convert(sample_path(), target, "--to", "v2.1")
    assert again.returncode == 2
    assert again.stderr == f"error: {target}: exists already; name another folder or remove it\n"
    assert "Traceback" not in convert(tmp_path, tmp_path / "new").stderr
