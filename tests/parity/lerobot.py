"""The environment of lerobot, and programs that run in it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from tests.parity.type_parameters import lower_package
from tests.support.environments import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
ENVIRONMENT = Environment(
    requirements=HERE / "requirements" / "lerobot.txt",
    root=HERE.parents[1] / "build" / "parity",
    pip_options=("--ignore-requires-python",),
    finish=lower_package,
)
# Earlier versions, for the datasets that they write: v2.1 and, by 0.4, v3.0
V21_ENVIRONMENT, V30_ENVIRONMENT = (
    Environment(requirements=HERE / "requirements" / f"{name}.txt", root=ENVIRONMENT.root)
    for name in ("lerobot_v21", "lerobot_04")
)
VERSION, CLIENT_VERSION = (
    next(pin.replace("==", " ") for pin in ENVIRONMENT.pinned_packages if pin.startswith(f"{name}=="))
    for name in ("lerobot", "openpi-client")
)
requires_lerobot = pytest.mark.skipif(
    not ENVIRONMENT.is_built, reason=f"there is no environment with {VERSION} in build/parity: `make parity` builds it"
)


def run_script(
    name: str, folder: Path, environment: Environment = ENVIRONMENT, variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a script of `scripts/` on a folder, in an environment and offline, with further environment variables."""
    command = [environment.python, "-W", "ignore", HERE / "scripts" / f"{name}.py", folder]
    env = environment.variables() | dict(variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
