"""Resolution of benchbox together with other packages that pin their dependencies."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.environments import uv

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A package that benchbox is installed beside, with the oldest Python that it supports."""

    requirement: str
    python_version: str


NEIGHBOURS = (
    Neighbour("lerobot==0.4.4", "3.11"),
    Neighbour("lerobot[pi,smolvla]==0.4.4", "3.11"),
    Neighbour("lerobot>=0.6,<0.7", "3.12"),
    Neighbour("lerobot[dataset,training,pi,smolvla]>=0.6,<0.7", "3.12"),
)


class NetworkError(Exception):
    """The package index does not answer."""


class NoSolutionError(Exception):
    """No versions satisfy all requirements."""


def resolve(requirements: Sequence[str], python_version: str) -> dict[str, str]:
    """Return the versions of all packages that an installation of this checkout with other requirements would choose.

    Nothing is installed and no package is downloaded.

    Raises:
        NoSolutionError: the requirements contradict those of pyproject.toml.
        NetworkError: the package index does not answer.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        Path(file.name).write_text("".join(f"{requirement}\n" for requirement in requirements))
        options = ("--python-version", python_version, "--python-platform", "linux", "--no-annotate", "--no-header", "--quiet")
        try:
            result = uv("pip", "compile", *options, "pyproject.toml", file.name, timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NetworkError(f"no answer within {_TIMEOUT_S:.0f} s") from None
    if result.returncode:
        error = NoSolutionError if "No solution" in result.stderr else NetworkError
        raise error(result.stderr.strip())
    pins = (line.partition(";")[0].strip().partition("==") for line in result.stdout.splitlines())
    return {name: version for name, _, version in pins if version}
