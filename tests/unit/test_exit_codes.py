"""Exit codes and statuses of errors, which are public: scripts and CI branch on them."""

from __future__ import annotations

import pytest

from benchbox import errors

CODES = {
    "BenchboxError": (1, "crash"),
    "ConfigurationError": (2, "unsupported"),
    "DataError": (2, "crash"),
    "CheckpointError": (3, "crash"),
    "RecordError": (2, "crash"),
    "UnsupportedError": (3, "unsupported"),
    "MismatchError": (3, "mismatch"),
    "NonFiniteError": (3, "nan"),
    "GradientSpikeError": (3, "crash"),
    "CellFailedError": (3, "crash"),
    "ThresholdError": (4, "crash"),
}


@pytest.mark.parametrize("name", CODES)
def test_an_error_ends_a_command_with_its_exit_code_and_a_launch_with_its_status(name: str) -> None:
    error = getattr(errors, name)
    assert (error.exit_code, error.status) == CODES[name]


def test_every_error_is_in_the_table() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == CODES.keys()
