"""Environments without benchbox that the scripts run in, built once below `build/audit-corpus`.

They borrow torch, accelerate, DeepSpeed and transformers from the environment of this interpreter, so that torch is installed
once, and add the pinned packages of `requirements/<name>.txt`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "audit-corpus"
REQUIREMENTS = HERE / "requirements"
# Folder with torch. The packages in it are borrowed.
_PACKAGES = Path(str(find_spec("torch").origin)).parents[1]
# A venv does not borrow them with the packages: their first lines name the interpreter.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
# Variables of the caller that would lead a script into another environment, or make runs depend on the shell.
_DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "DS_", "OMP_", "PIP_", "UV_", "BENCHBOX_", "ACCELERATE_", "TORCH_", "PYTEST_")


def environment_names() -> list[str]:
    """Return the names of all environments."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment_folder(name: str) -> Path:
    return BUILD / "environments" / name


def build_environment(name: str) -> None:
    """Build an environment, or return at once if nothing that it depends on has changed since it was built.

    Raises:
        subprocess.CalledProcessError: a package could not be installed.
    """
    folder = environment_folder(name)
    requirements = REQUIREMENTS / f"{name}.txt"
    # Scripts of an environment name its path.
    inputs = f"{requirements.read_text()} {sys.version} {_PACKAGES} {folder}"
    digest = hashlib.sha256(inputs.encode()).hexdigest()
    stamp = folder / "built"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    # Path files in a folder that a path file names are not read: packages are borrowed, an editable install is not.
    (site_packages / "borrowed.pth").write_text(f"{_PACKAGES}\n")
    own = Path(sys.executable).parent
    for launcher in _LAUNCHERS:
        (folder / "bin" / launcher).write_text(f"#!{python}\n" + (own / launcher).read_text().partition("\n")[2])
        (folder / "bin" / launcher).chmod(0o755)
    (folder / "bin" / "ninja").symlink_to(own / "ninja")  # DeepSpeed compiles with it
    if pinned_packages(name):
        # The requirements are complete: nothing else may be installed over a borrowed package.
        install = ["install", "--quiet", "--no-deps", "--requirement", str(requirements)]
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    probe = subprocess.run(
        [python, "-c", "import benchbox.cli"], cwd=folder, env=variables(name), capture_output=True, text=True
    )
    if "No module named 'benchbox" not in probe.stderr:
        raise RuntimeError(f"{folder}: benchbox can be imported in an environment that must not have it")
    stamp.write_text(digest)


def pinned_packages(name: str) -> list[str]:
    """Return the lines `package==version` of an environment's requirements."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def variables(name: str) -> dict[str, str]:
    """Return the environment variables of a command that runs offline in an environment."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED_PREFIXES)}
    folder = environment_folder(name)
    return inherited | {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": str(folder),
        "HOME": str(BUILD / "home"),  # configuration files and caches of the libraries
        "TORCH_EXTENSIONS_DIR": str(BUILD / "torch-extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UV_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
    }


def build_deepspeed_extension(name: str) -> None:
    """Compile DeepSpeed's extension before anything is timed, and so that a killed script cannot leave a stale lock behind."""
    build = "from benchbox.backends.extension import build_extension; build_extension()"
    (BUILD / "torch-extensions").mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", build], env=variables(name), check=True, timeout=600, capture_output=True)
