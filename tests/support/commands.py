"""The command in the process of the test, for what needs no process of its own: a new interpreter imports for seconds."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest import mock

from benchbox.cli.app import main

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def run_in_process(
    *arguments: str | Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as its entry point does, with its output not on a terminal, and return exit code and output."""
    command = ["benchbox", *map(str, arguments)]
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd or os.curdir))
        stack.enter_context(mock.patch.dict(os.environ, variables or {}))  # and what the command sets is unset again
        stack.enter_context(mock.patch.object(sys, "argv", command))
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    printed, errors = (stream.buffer.getvalue().decode() for stream in (stdout, stderr))
    return subprocess.CompletedProcess(command, code, printed, errors)
