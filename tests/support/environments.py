"""Environments without benchbox, which tests run programs of other libraries in; each is built once.

They borrow torch, accelerate, DeepSpeed and transformers from the environment of this interpreter, so that torch is installed
once, and add the pinned packages of a requirements file.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Folder with torch. The packages in it are borrowed.
_PACKAGES = Path(str(find_spec("torch").origin)).parents[1]
# A venv does not borrow them with the packages: their first lines name the interpreter.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
# Variables of the caller that would lead a script into another environment, or make runs depend on the shell.
_DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "DS_", "OMP_", "PIP_", "UV_", "BENCHBOX_", "ACCELERATE_", "TORCH_", "PYTEST_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment that borrows this interpreter's torch.

    Args:
        requirements: file of pinned packages. They are complete: nothing else is installed over a borrowed package.
        root: folder below which environments of one purpose, their caches and their home are.
        pip_options: further options of `pip install`.
        finish: called with the folder of the installed packages after installation.
    """

    requirements: Path
    root: Path
    pip_options: tuple[str, ...] = ()
    finish: Callable[[Path], None] | None = None

    @property
    def folder(self) -> Path:
        return self.root / "environments" / self.requirements.stem

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def pinned_packages(self) -> list[str]:
        """The lines `package==version` of its requirements."""
        lines = self.requirements.read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def is_built(self) -> bool:
        """Return whether it was built, and nothing that it depends on has changed since."""
        stamp = self.folder / "built"
        return stamp.exists() and stamp.read_text() == self._digest()

    def build(self) -> None:
        """Build the environment, or return at once if it is built.

        Raises:
            subprocess.CalledProcessError: a package could not be installed.
        """
        if self.is_built:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        (site_packages,) = (self.folder / "lib").glob("python*/site-packages")
        # Path files in a folder that a path file names are not read: packages are borrowed, an editable install is not.
        (site_packages / "borrowed.pth").write_text(f"{_PACKAGES}\n")
        own = Path(sys.executable).parent
        for launcher in _LAUNCHERS:
            script = self.folder / "bin" / launcher
            script.write_text(f"#!{self.python}\n" + (own / launcher).read_text().partition("\n")[2])
            script.chmod(0o755)
        (self.folder / "bin" / "ninja").symlink_to(own / "ninja")  # DeepSpeed compiles with it
        if self.pinned_packages:
            install = ["install", "--quiet", "--no-deps", *self.pip_options, "--requirement", str(self.requirements)]
            subprocess.run([sys.executable, "-m", "pip", "--python", str(self.python), *install], check=True)
        if self.finish is not None:
            self.finish(site_packages)
        probe = subprocess.run(
            [self.python, "-c", "import benchbox.cli"], cwd=self.folder, env=self.variables(), capture_output=True, text=True
        )
        if "No module named 'benchbox" not in probe.stderr:
            raise RuntimeError(f"{self.folder}: benchbox can be imported in an environment that must not have it")
        (self.folder / "built").write_text(self._digest())

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a command that runs offline in it."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED_PREFIXES)}
        return inherited | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)]),
            "VIRTUAL_ENV": str(self.folder),
            "HOME": str(self.root / "home"),  # configuration files and caches of the libraries
            "TORCH_EXTENSIONS_DIR": str(self.root / "torch-extensions"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "UV_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _digest(self) -> str:
        # Scripts of an environment name its path.
        inputs = f"{self.requirements.read_text()} {sys.version} {_PACKAGES} {self.folder}"
        if self.finish is not None:
            inputs += inspect.getsource(sys.modules[self.finish.__module__])
        return hashlib.sha256(inputs.encode()).hexdigest()
