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
def test_a_state_is_read_as_it_was_written(state: RankState, tmp_path: Path) -> None:
    writer = RankStateFile(tmp_path / "state")
    assert read_rank_state(tmp_path / "state") is None
    before = RankState("warmup", 1, 2, "forward", 1.0)
    writer.write(before)
    assert read_rank_state(tmp_path / "state") == before
    writer.write(state)
    assert read_rank_state(tmp_path / "state") == state
    assert read_rank_state(tmp_path / "nothing") is None
