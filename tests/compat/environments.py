"""Environments with the lowest and the highest versions of all dependencies, built once below `build/compat`.

Each contains exactly the packages of `requirements/<name>.txt` and this checkout. torch comes from PyPI, which serves its CUDA
build for Linux with the libraries of NVIDIA: an environment takes about 8 GB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "compat"
_REQUIREMENTS = Path(__file__).parent / "requirements"
# Variables of the caller that would lead a command into another environment, or make results depend on the shell.
_DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "CONDA_", "DS_", "OMP_", "BENCHBOX_", "ACCELERATE_", "TORCH_", "PYTEST_")


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python version and one version of every package."""

    name: str
    python_version: str
    resolution: str  # uv's strategy for the direct dependencies; all others are the newest that fit

    @property
    def requirements(self) -> Path:
        return _REQUIREMENTS / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


EXTRAS = ("lowbit", "test")  # that the environments install
ENVIRONMENTS = (
    Environment("lowest", "3.11", "lowest-direct"),
    Environment("highest", "3.13", "highest"),
)


def uv(*arguments: str | Path, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run uv of this interpreter's environment. It uses installed versions of Python only."""
    # One cache for both environments, on the same file system: uv then links files instead of copying them.
    variables = os.environ | {"UV_CACHE_DIR": str(BUILD / "cache"), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    variables.pop("VIRTUAL_ENV", None)
    command = [sys.executable, "-m", "uv", *map(str, arguments)]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)


def lock(environment: Environment) -> None:
    """Write the requirements of an environment anew from pyproject.toml, with everything that the packages require.

    Raises:
        RuntimeError: no set of versions satisfies all requirements, or PyPI cannot be reached.
    """
    _run(
        *("pip", "compile", "--quiet", "--upgrade", "--no-annotate", "--custom-compile-command", "make compat-requirements"),
        *("--python-version", environment.python_version, "--python-platform", "linux"),
        *("--resolution", environment.resolution),
        *chain.from_iterable(("--extra", extra) for extra in EXTRAS),
        *("pyproject.toml", "--output-file", environment.requirements),
    )


def build(environment: Environment) -> None:
    """Build an environment, or return at once if nothing that it depends on has changed since it was built.

    Raises:
        RuntimeError: its Python is not installed, or a package cannot be installed.
    """
    interpreter = find_python(environment.python_version)
    inputs = (environment.requirements.read_text(), (ROOT / "pyproject.toml").read_text(), str(interpreter), str(ROOT))
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    stamp = environment.folder / "built"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    _run("venv", "--quiet", "--python", interpreter, environment.python.parents[1])
    install = ("pip", "install", "--quiet", "--python", environment.python, "--no-deps")
    _run(*install, "--requirements", environment.requirements)
    _run(*install, "--editable", ROOT)
    _run("pip", "check", "--quiet", "--python", environment.python)
    stamp.write_text(digest)


def find_python(version: str) -> Path:
    """Return an interpreter of a version such as 3.11: this one, one on the PATH, or one of pyenv.

    Raises:
        RuntimeError: none is installed.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [sys.executable, shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    script = "import os, sys; print(*sys.version_info[:2], sep='.'); print(os.path.realpath(sys.executable))"
    for candidate in filter(None, candidates):
        # A shim of pyenv is on the PATH for versions that are not selected, and fails.
        output = subprocess.run([candidate, "-c", script], capture_output=True, text=True, check=False).stdout.split("\n")
        if output[0] == version:
            return Path(output[1])
    raise RuntimeError(f"Python {version} is not installed")


def installed_versions(environment: Environment, packages: list[str]) -> dict[str, str]:
    """Return the versions that an environment's interpreter reports, its own under `python`."""
    script = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    )
    command = [environment.python, "-c", script, *packages]
    output = subprocess.run(command, env=variables(environment), capture_output=True, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def variables(environment: Environment) -> dict[str, str]:
    """Return the environment variables of a command that runs offline in an environment."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED_PREFIXES)}
    return inherited | {
        "PATH": os.pathsep.join([str(environment.python.parent), os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": str(environment.python.parents[1]),
        "HF_HUB_OFFLINE": "1",
    }


def _run(*arguments: str | Path) -> None:
    result = uv(*arguments)
    if result.returncode:
        raise RuntimeError(f"uv {' '.join(map(str, arguments))}\n{result.stderr.strip()}")
