"""A fresh virtual environment in which packages of third parties are installed, as their users would."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
THIRD_PARTY = Path(__file__).parent / "third_party"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that sees the packages of the running interpreter, and those installed into it."""

    folder: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, package: Path) -> None:
        """Install a package from its sources by pip, without an index."""
        sources = self.folder.parent / f"sources-of-{package.name}"
        shutil.copytree(package, sources, dirs_exist_ok=True)  # a build leaves files behind
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "install"]
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        run([*pip, *options, str(sources)], cwd=self.work)

    def benchbox(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command in this environment."""
        command = [self.python, "-m", "benchbox.cli.app", *arguments]
        return subprocess.run(
            list(map(str, command)),
            cwd=self.work,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=500,
        )


def run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.fail(f"{command}:\n{done.stdout}{done.stderr}")


def create_environment(folder: Path) -> Environment:
    """Create an environment whose packages come from the running interpreter, so that nothing is downloaded."""
    work = folder / "work"
    work.mkdir()
    environment = Environment(folder / "venv", work)
    venv.create(environment.folder, symlinks=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(environment.folder)}))
    folders = [*site.getsitepackages(), str(ROOT)]
    # `addsitedir` also reads the .pth files of the running interpreter, as an editable install needs.
    lines = ["import site, sys; " + "; ".join(f"site.addsitedir({folder!r})" for folder in folders)]
    (purelib / "running_interpreter.pth").write_text("\n".join(lines) + "\n")
    return environment


@pytest.fixture(scope="session")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the package of `third_party/`."""
    environment = create_environment(tmp_path_factory.mktemp("acme"))
    environment.install(THIRD_PARTY)
    return environment
