"""Hash chain over the plan and the records of a run, `chain.jsonl`: shows what was edited, removed or reordered afterwards.

A line is appended, and on disk, before the file that it describes is written. Its digest is the SHA-256 of the digest of the
line before and of its own content, so that the last digest, the head, stands for everything before it. A launch that is
measured again adds a line, and its earlier line stays.

The chain has no key. Whoever can edit a record can also compute all digests anew. What they cannot do is keep the head: it
is printed when a run ends and in its report, and `benchbox verify --head` compares. Nor does a chain show that what was written
first was true: invariants are for that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from benchbox.errors import RecordError
from benchbox.store.files import json_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Kind = Literal["plan", "record", "removed"]


class ChainEntry(TypedDict):
    """One line. `removed` is a record that the runner discarded."""

    kind: Kind
    cell_id: NotRequired[str]
    launch: NotRequired[int]
    sha256: str | None  # of the content; null when it was removed
    digest: str


class ChainReader:
    """Entries of a chain, each checked as it is read, up to the first line that does not follow from the line before it.

    Iterating reads the file, one entry at a time: the chain of a run of many launches is long.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head: str | None = None  # digest of the last entry that was read so far
        self.defect: str | None = None  # what is wrong with the line at which reading ended, if it has and anything is

    def __iter__(self) -> Iterator[ChainEntry]:
        self.head = self.defect = None
        if not self._path.is_file():
            return
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return  # the machine stopped within a line, whose record was not written yet
                try:
                    entry = json.loads(line)
                    is_entry = isinstance(entry["kind"], str) and entry["digest"] == _digest(self.head or "", entry)
                except (AttributeError, KeyError, TypeError, ValueError):
                    is_entry = False
                if not is_entry:
                    self.defect = f"line {number} does not follow: it or a line before it was edited or removed"
                    return
                self.head = entry["digest"]
                yield cast("ChainEntry", entry)


def content_sha256(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, whatever its layout and the order of its keys."""
    return hashlib.sha256(json_text(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plan_sha256(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of `run.json` without the time at which it was written."""
    return content_sha256({name: value for name, value in values.items() if name != "created_at"})


def _digest(previous: str, entry: Mapping[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != "digest"}
    return hashlib.sha256(f"{previous}\n{content_sha256(content)}".encode()).hexdigest()


class Chain:
    """The chain of one run directory. Only the command that holds the lock of the run appends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return self.path.is_file()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append an entry (without its digest), and return when it is on disk.

        Raises:
            RecordError: the last line is no entry, so that nothing can follow from it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - 4096))  # longer than any two lines: the cost does not grow with the chain
            *lines, torn = stream.read().split(b"\n")
            if torn:  # the machine stopped within a line, whose record was not written yet
                stream.truncate(end - len(torn))
            try:
                previous = str(json.loads(lines[-1])["digest"]) if lines else ""
            except (KeyError, RecursionError, TypeError, ValueError):
                raise RecordError(
                    f"{self.path}: the last line is no entry of a chain; remove it, or choose another --out"
                ) from None
            stream.write(json.dumps({**entry, "digest": _digest(previous, entry)}).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def head(self) -> str | None:
        """Return the last digest, or None without a chain."""
        return self._read_to_its_end().head

    def defect(self) -> str | None:
        """Return what is wrong with the first line that does not follow from the line before it, or None."""
        return self._read_to_its_end().defect

    def _read_to_its_end(self) -> ChainReader:
        reader = self.read()
        deque(reader, maxlen=0)
        return reader

    def describe(self) -> str:
        """Return one line: the head and the number of entries, or that there is no chain."""
        if not self.exists():
            return "no chain"
        reader = self.read()
        entries = sum(1 for _ in reader)
        return f"chain of {entries} entries, head {reader.head}"

    def head_problem(self, head: str) -> str | None:
        """Return how a head that was printed earlier contradicts the chain, or None when the chain continues from it."""
        if not self.exists():
            return "there is no chain to compare the head with"
        if any(entry["digest"] == head for entry in self.read()):
            return None
        return f"no entry of the chain has the digest {head}: the chain was made anew after that head was printed"

    def sha256_by_launch(self) -> dict[tuple[str, int], str | None]:
        """Return what the last entry of each launch says; empty when there is no chain, or one that was edited."""
        reader = self.read()
        by_launch = {(entry["cell_id"], entry["launch"]): entry["sha256"] for entry in reader if entry["kind"] != "plan"}
        return {} if reader.defect else by_launch

    def read(self) -> ChainReader:
        """Return its entries, to be iterated over; none when there is no chain."""
        return ChainReader(self.path)
