"""Collect the wheels that `make gpu` installs on a machine without network: `make gpu-bundle`.

Large packages that come with PyTorch images are not collected, see `PRESENT`. DeepSpeed is built from its source distribution
without compiled operations, which benchbox does not use on a GPU. Versions are those of this environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 60_000_000
# Expected on the machine, together with what they require: torch and packages that are too large, and those whose versions
# transformers pins.
PRESENT = frozenset(
    {
        *("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib"),
        *("transformers", "tokenizers", "safetensors", "huggingface-hub"),
    }
)
TEST_RUNNER = ("pytest", "pytest-timeout")
BUILT_HERE = "deepspeed"  # published without a wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=platform.python_version(), help="Python version of the machine with the GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    arguments = parser.parse_args()
    pins = collect_pins(arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        download(pins, arguments.python, Path(folder))
        wheels = sorted(Path(folder).glob("*.whl"))
        missing = set(pins) - {parse_wheel_filename(wheel.name)[0] for wheel in wheels}
        size = sum(wheel.stat().st_size for wheel in wheels)
        if missing:
            sys.exit(f"gpu-bundle: no wheel of {', '.join(sorted(missing))}")
        if size > LIMIT_BYTES:
            sys.exit(f"gpu-bundle: {size / 1e6:.1f} MB of wheels, more than {LIMIT_BYTES / 1e6:.0f} MB; nothing was written")
        shutil.rmtree(arguments.out, ignore_errors=True)
        arguments.out.mkdir(parents=True)
        for wheel in wheels:
            shutil.copy(wheel, arguments.out)
    print(f"{arguments.out}: {len(wheels)} wheels for Python {arguments.python}, {size / 1e6:.1f} MB")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def collect_pins(python: str) -> dict[str, str]:
    """Return name and version of everything that benchbox and its GPU tests require, without `PRESENT`."""
    target = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2]), "extra": ""}
    pending = [Requirement(line) for line in (*project()["dependencies"], *TEST_RUNNER)]
    pins: dict[str, str] = {}
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate(target)
        if wanted and name not in PRESENT and name not in pins:
            pins[name] = version(name)
            pending += map(Requirement, requires(name) or [])
    return pins


def download(pins: dict[str, str], python: str, folder: Path) -> None:
    """Put a wheel of each package, for Linux on this processor architecture, into a folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    tags = [f"manylinux_2_{minor}_{platform.machine()}" for minor in range(5, 40)]
    tags += [f"{name}_{platform.machine()}" for name in ("manylinux1", "manylinux2010", "manylinux2014")]
    target = ["--python-version", python, "--implementation", "cp", *(word for tag in tags for word in ("--platform", tag))]
    published = [f"{name}=={pin}" for name, pin in pins.items() if name != BUILT_HERE]
    run([*pip, "download", "--no-deps", "--only-binary", ":all:", *target, "--dest", str(folder), *published])
    source = [f"{BUILT_HERE}=={pins[BUILT_HERE]}"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *source], DS_BUILD_OPS="0")


def run(command: list[str], **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, check=False)
    if done.returncode:
        sys.exit(f"gpu-bundle: pip {command[5]} failed with exit code {done.returncode}")


if __name__ == "__main__":
    main()
