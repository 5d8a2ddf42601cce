import subprocess
import sys
import time
from pathlib import Path

from benchbox.store.rank_state import read_rank_state


def test_a_killed_writer_leaves_a_complete_state(tmp_path: Path) -> None:
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
