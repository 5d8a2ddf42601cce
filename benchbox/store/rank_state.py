"""State of a rank in a memory-mapped file: writing it takes no system call, and it survives the death of the rank.

Heartbeats are too coarse to tell in which phase a rank was killed, and an event for every phase would fill the disk.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from benchbox.registry.phases import COMPILATION, PHASES, STAGES, RankState

if TYPE_CHECKING:
    from pathlib import Path

# The number of writes, then two slots written alternately: the number is incremented last, so its slot is always complete. The
# number itself is stored at once, through a view of integers: `struct` clears its bytes first, and a kill may come in between.
_COUNT = struct.Struct("=q")
_SLOT = struct.Struct("<bbqqd")  # stage, phase, step, of, since; -1 for none
_SIZE = _COUNT.size + 2 * _SLOT.size

_STAGE_NUMBERS = {stage: number for number, stage in enumerate(STAGES)}
_PHASES = (*PHASES, COMPILATION)
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}


class RankStateFile:
    """Writer of one rank's state."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as stream:
            stream.truncate(_SIZE)
            self._memory = mmap.mmap(stream.fileno(), _SIZE)
        self._number = memoryview(self._memory)[: _COUNT.size].cast("q")
        self._count = 0

    def write(self, state: RankState) -> None:
        """Replace the state.

        Raises:
            KeyError: an unknown stage or phase.
        """
        stage, step, of, phase, since = state
        self._count += 1
        _SLOT.pack_into(
            self._memory,
            _COUNT.size + self._count % 2 * _SLOT.size,
            _STAGE_NUMBERS[stage],
            -1 if phase is None else _PHASE_NUMBERS[phase],
            -1 if step is None else step,
            -1 if of is None else of,
            since,
        )
        self._number[0] = self._count


def read_rank_state(path: Path) -> RankState | None:
    """Return the last state that a rank wrote, or None if it wrote none. The rank must have ended or be stuck."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _SIZE:
        return None
    (count,) = _COUNT.unpack_from(data)
    if count == 0:
        return None
    stage, phase, step, of, since = _SLOT.unpack_from(data, _COUNT.size + count % 2 * _SLOT.size)
    return RankState(
        STAGES[stage],
        None if step < 0 else step,
        None if of < 0 else of,
        None if phase < 0 else _PHASES[phase],
        since,
    )
