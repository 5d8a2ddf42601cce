"""The one exception tree.

Every error a user can cause derives from `BenchboxError` and carries the exit code of the command that it ends. Errors that
end a cell also carry the record status they are filed under, so that a failure is typed by its class and never by its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_CELL_FAILED = 3
EXIT_THRESHOLD = 4
EXIT_INCONCLUSIVE = 5
EXIT_STOPPED = 130  # 128 + SIGINT, as a shell reports it

MAKE_ROOM = "make room, or write elsewhere"  # what to do about a full disk


class BenchboxError(Exception):
    """Anything benchbox reports in one line instead of a traceback."""

    exit_code = EXIT_INTERNAL
    status = "crash"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of an input: its position (`file:line:column`), what is wrong, and what to do about it."""

    where: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        line = f"{self.where}: {self.message}" if self.where else self.message
        return f"{line}; {self.hint}" if self.hint else line


class ConfigurationError(BenchboxError):
    """The input is wrong. All its problems are reported at once, one line each."""

    exit_code = EXIT_USAGE
    status = "unsupported"

    def __init__(self, problems: Problem | Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(BenchboxError):
    """A dataset is missing, damaged, or not what the policy needs."""

    exit_code = EXIT_USAGE


class CheckpointError(DataError):
    """A checkpoint of a training could not be written; `rank` is the one that could not, of all that raise the error."""

    exit_code = EXIT_CELL_FAILED

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RecordError(BenchboxError):
    """A run directory or a record in it cannot be read."""

    exit_code = EXIT_USAGE


class UnsupportedError(BenchboxError):
    """The combination asked for cannot work on this backend or machine, and the message says why."""

    exit_code = EXIT_CELL_FAILED
    status = "unsupported"


class MismatchError(BenchboxError):
    """The set-up observed on the live objects differs from the requested one."""

    exit_code = EXIT_CELL_FAILED
    status = "mismatch"


class NonFiniteError(BenchboxError):
    """A loss, a gradient norm or an action of a policy is NaN or infinite."""

    exit_code = EXIT_CELL_FAILED
    status = "nan"


class GradientSpikeError(BenchboxError):
    """A gradient norm is a spike, and the configuration says to stop at one."""

    exit_code = EXIT_CELL_FAILED


class CellFailedError(BenchboxError):
    """At least one cell of a run did not end ok; its record says how."""

    exit_code = EXIT_CELL_FAILED


class ThresholdError(BenchboxError):
    """A gate was not met, or the audit found an error."""

    exit_code = EXIT_THRESHOLD


def reason_of(error: BaseException) -> str:
    """Return the first line of the message of a library's error, or its class where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
