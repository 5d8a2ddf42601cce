"""JSON on disk: standard JSON only, written atomically, with errors that name the file."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from benchbox.errors import RecordError

_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")  # of `atomic_file`: the name, and eight characters of mkstemp


def replace_non_finite(value: Any) -> Any:
    """Return the value with NaN and infinities replaced by None: standard JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(item) for item in value]
    return value


def complete_lines(path: Path, offset: int) -> list[bytes]:
    """Return the lines that a file has from `offset` (bytes) on, each with its newline; none of a file that does not exist yet.

    A final line without its newline is still being written, and left for the next call.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return []
    return text[: text.rfind(b"\n") + 1].splitlines(keepends=True)


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON, with null for non-finite numbers; `options` are those of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (TypeError, ValueError):  # it has such a number, or another mapping than a dictionary
        return json.dumps(replace_non_finite(value), allow_nan=False, **options)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when it is complete.

    If the machine stops or an exception is raised, the old file is left as it was.

    Raises:
        OSError: the file cannot be written; `filename` is `path`, and not that of the temporary file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide results from colleagues
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def remove_temporary_files(folder: Path, *, names: Collection[str], subfolders: Collection[str]) -> None:
    """Remove what `atomic_file` has left in a folder where its process was killed, and nothing of anybody else.

    Args:
        names: files that benchbox writes into the folder itself.
        subfolders: those that benchbox makes in it, of which all files count.
    """
    for path in folder.glob(".*.tmp"):
        if (match := _TEMPORARY.fullmatch(path.name)) and match[1] in names:
            path.unlink(missing_ok=True)
    for subfolder in subfolders:
        for path in (folder / subfolder).rglob(".*.tmp"):
            if _TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. What is no character, such as a byte of a path that is not UTF-8, becomes an escape."""
    with atomic_file(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))


def keep_rows(path: Path, is_kept: Callable[[int], bool]) -> None:
    """Leave those rows of a JSON Lines file whose `step` is kept, and remove a line that was not written to its end.

    A full disk or a killed process leaves a part of a line, and what was written later may follow on it.
    """
    rows = [(line, _step_of_row(line)) for line in path.read_text(errors="replace").splitlines(keepends=True)]
    write_text(path, "".join(line for line, step in rows if step is not None and is_kept(step)))


def _step_of_row(line: str) -> int | None:
    if not line.endswith("\n"):
        return None
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """Write a value as JSON, atomically; non-finite numbers become null. Without `indent` it takes a fraction of the time."""
    write_text(path, json_text(value, indent=indent) + "\n")


def read_json(path: Path, remedy: str = "delete it and run again") -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        remedy: what to do about another content. A file that the user names is not to be deleted.

    Raises:
        RecordError: the file is missing, unreadable, cut off, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        problem = f"not whole JSON ({error.msg} at {where})" if error.doc.strip() else "empty"
    except UnicodeDecodeError:
        problem = "not text"
    except (RecursionError, ValueError):
        problem = "nested too deeply, or with a number of too many digits: not what benchbox writes"
    else:
        if isinstance(value, dict):
            return value
        problem = f"a JSON {type(value).__name__}, and an object is expected"
    raise RecordError(f"{path}: {problem}; {remedy}")
