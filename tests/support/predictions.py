"""Predictions of commands without a process of their own, which would import torch for seconds."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def predicting_in_this_process() -> Iterator[None]:
    """Predict in the process of the test, which has imported torch."""
    with mock.patch("benchbox.cli.predicting._in_process", lambda function, *arguments: function(*arguments)):
        yield
