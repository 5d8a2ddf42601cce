import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchbox.registry.phases import RankState
from benchbox.store.rank_state import RankStateFile, read_rank_state


@pytest.mark.parametrize(
    "state",
    [
        RankState("build", None, None, None, 1.5),
        RankState("train", 7, 10**12, "sync", 2.5),
        RankState("measure", 0, 3, "clip", 0.0),
    ],
)
def test_a_place_is_read_as_it_was_written(state: RankState, tmp_path: Path) -> None:
    writer = RankStateFile(tmp_path / "state")
    assert read_rank_state(tmp_path / "state") is None
    before = RankState("warmup", 1, 2, "forward", 1.0)
    writer.write(before)
    assert read_rank_state(tmp_path / "state") == before
    writer.write(state)
    assert read_rank_state(tmp_path / "state") == state
    assert read_rank_state(tmp_path / "nothing") is None


def test_a_killed_writer_leaves_a_whole_place(tmp_path: Path) -> None:
    path = tmp_path / "state"
    code = (
        "import sys; from pathlib import Path\n"
        "from benchbox.registry.phases import RankState; from benchbox.store.rank_state import RankStateFile\n"
        "places, n = RankStateFile(Path(sys.argv[1])), 0\n"
        "while True: n += 1; places.write(RankState('measure', n, n, 'forward', float(n)))\n"
    )
    for _ in range(5):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", code, path])
        while read_rank_state(path) is None:
            time.sleep(0.01)
        writer.kill()
        writer.wait()
        state = read_rank_state(path)
        assert state is not None
        assert state.step
        assert state.step == state.of == state.since
