"""Reader of the files that Weights & Biases writes offline.

The file is a header of 7 bytes, then records in the format of LevelDB's log: blocks of 32 KiB, in which every part of a record
has its checksum, length and type (1 complete, 2 first, 3 middle, 4 last).
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_PART = struct.Struct("<IHB")


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the values that were logged, one mapping for each call."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def _records(file: bytes) -> Iterator[bytes]:
    position, record = _FILE_HEADER, b""
    while position + _PART.size <= len(file):
        if (left := _BLOCK - position % _BLOCK) < _PART.size:
            position += left
            continue
        _, length, kind = _PART.unpack_from(file, position)
        position += _PART.size
        record += file[position : position + length]
        position += length
        if kind in (1, 4):
            yield record
            record = b""
