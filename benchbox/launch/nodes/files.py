"""Files in the shared folder by which the nodes of a run coordinate.

Each node writes one file, `nodes/node-<r>.json`, and reads those of the others. A file is replaced as a whole, at every change
and as a heartbeat once a second. Clocks of machines differ, so a node is silent when its file has not changed for some time of
the reader's clock.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from benchbox.errors import CellFailedError, ConfigurationError, Problem, RecordError
from benchbox.launch.fingerprint import benchbox_sha256
from benchbox.store.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

NODES = "nodes"  # subfolder of a run or training
POLL_S = 0.2
_HEARTBEAT_S = 1.0


class NodeLostError(CellFailedError):
    """A node of the run ended or stopped reporting."""


def node_file(folder: Path, node: int) -> Path:
    return folder / NODES / f"node-{node}.json"


class NodeFile:
    """The file of this node, and its heartbeat as long as the context is open.

    Fields of every node: `id` (new at every start), `host`, `folder`, `benchbox_sha256`, `beat`, `ended` (number of the last
    launch that has ended here) and `closed`.
    """

    def __init__(self, folder: Path, node: int) -> None:
        self.id = uuid.uuid4().hex
        self.folder = folder
        self._path = node_file(folder, node)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="node-heartbeat", daemon=True)
        self._values: dict[str, Any] = {
            "id": self.id,
            "host": socket.gethostname(),
            "folder": str(folder.resolve()),
            "benchbox_sha256": benchbox_sha256(),
            "beat": 0,
            "ended": 0,
            "closed": False,
        }

    def __enter__(self) -> Self:
        """Write the file and start the heartbeat.

        Raises:
            ConfigurationError: the folder cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.update()
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            raise ConfigurationError(Problem(str(self._path.parent), message, "name a folder that all nodes share")) from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # the other nodes lose this one when it no longer reports
            self.update(closed=True)

    def update(self, **values: Any) -> None:
        """Set fields and write the file."""
        with self._lock:
            self._values.update(values)
            self._values["beat"] += 1
            write_json(self._path, self._values, indent=None)

    def _beat(self) -> None:
        while not self._stopped.wait(_HEARTBEAT_S):
            with suppress(OSError):  # of a full disk, or a server that does not answer, which may come back
                self.update()


class NodeWatch:
    """The file of another node. The node is lost when it has ended, or its file has not changed for `timeout_s`."""

    def __init__(self, folder: Path, node: int, timeout_s: float) -> None:
        self.node = node
        self._timeout_s = timeout_s
        self._path = node_file(folder, node)
        self._last: tuple[Any, Any] | None = None  # id and beat
        self._changed_at = time.monotonic()
        self.changes = 0
        self.values: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """Return the fields of the file, those last read where it is missing or cannot be read now."""
        try:
            self.values = read_json(self._path)
        except RecordError:
            return self.values
        state = (self.values.get("id"), self.values.get("beat"))
        if state != self._last:
            self.changes += self._last is not None
            self._last, self._changed_at = state, time.monotonic()
        return self.values

    @property
    def lost(self) -> bool:
        """True once the node has ended or stopped reporting."""
        return bool(self.values.get("closed")) or time.monotonic() - self._changed_at > self._timeout_s

    @property
    def label(self) -> str:
        """The node and its host."""
        host = self.values.get("host")
        return f"node {self.node} ({host})" if host else f"node {self.node}"
