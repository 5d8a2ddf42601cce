import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchbox.registry.phases import Place
from benchbox.store.rank_state import PlaceFile, read_place


@pytest.mark.parametrize(
    "place",
    [Place("build", None, None, None, 1.5), Place("train", 7, 10**12, "sync", 2.5), Place("measure", 0, 3, "clip", 0.0)],
)
def test_a_place_is_read_as_it_was_written(place: Place, tmp_path: Path) -> None:
    writer = PlaceFile(tmp_path / "place")
    assert read_place(tmp_path / "place") is None
    before = Place("warmup", 1, 2, "forward", 1.0)
    writer.write(before)
    assert read_place(tmp_path / "place") == before
    writer.write(place)
    assert read_place(tmp_path / "place") == place
    assert read_place(tmp_path / "nothing") is None


def test_a_killed_writer_leaves_a_whole_place(tmp_path: Path) -> None:
    path = tmp_path / "place"
    code = (
        "import sys; from pathlib import Path\n"
        "from benchbox.registry.phases import Place; from benchbox.store.rank_state import PlaceFile\n"
        "places, n = PlaceFile(Path(sys.argv[1])), 0\n"
        "while True: n += 1; places.write(Place('measure', n, n, 'forward', float(n)))\n"
    )
    for _ in range(5):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", code, path])
        while read_place(path) is None:
            time.sleep(0.01)
        writer.kill()
        writer.wait()
        place = read_place(path)
        assert place is not None
        assert place.step
        assert place.step == place.of == place.since
