"""Settings of a run on two nodes, and a job of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.launch.job import Job
from benchbox.launch.nodes.settings import NodeSettings

if TYPE_CHECKING:
    from pathlib import Path

NODES = NodeSettings(count=2, rank=0, master_addr="a", master_port=29500, timeout_s=1.0)
_CONFIG: Any = {}


def job(folder: Path, ranks: int = 4, **fields: Any) -> Job:
    return Job(config=_CONFIG, ranks=ranks, folder=folder, timeout_s=None, hang_after_s=1.0, **fields)
