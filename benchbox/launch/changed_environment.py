"""Differences between the libraries, machine and launcher of a record and those here, read without importing torch."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.measure.hardware import cpu_model, driver_version, gpu_names, physical_cores
from benchbox.registry.versions import installed_version

if TYPE_CHECKING:
    from benchbox.launch.job import Launcher
    from benchbox.registry.launch_environment import LaunchEnvironment


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries whose change makes a record outdated, as launches record them."""
    versions = {}
    if (torch := _torch_version()) is not None:
        versions["torch"] = torch
    for package in ("accelerate", "deepspeed"):
        if (version := installed_version(package)) is not None:
            versions[package] = version
    return versions


def _torch_version() -> str | None:
    """Return torch's version with its build, which the metadata of wheels of PyPI lack: 2.10.0+cu128."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "version.py"
        if file.is_file() and (match := re.search(r"^__version__ = ['\"](.+)['\"]", file.read_text(), re.MULTILINE)):
            return match[1]
    return None


def changed_library(environment: LaunchEnvironment) -> str | None:
    """Return the first library that has another version now, with both. What one side does not know is no change."""
    for package, installed in installed_versions().items():
        recorded = environment.get(package)
        if recorded is not None and recorded != installed:
            return f"{package} was {recorded}, and is {installed} now"
    return None


@cache
def _gpus() -> tuple[tuple[str, ...], str | None]:
    return tuple(gpu_names()), driver_version()


def other_machine(environment: LaunchEnvironment) -> str | None:
    """Return how this machine differs from the one that measured a record, or None.

    Only kinds of GPUs count, not their number, of which variables may show a launch a part.
    """
    if recorded := environment.get("devices"):
        # torch appends the instance of a divided GPU to the name.
        names, driver = _gpus()
        if missing := sorted({device for device in recorded if not device.startswith(names)}):
            return f"they were measured on {', '.join(missing)}, which this machine does not have"
        if (recorded_driver := environment.get("driver")) is not None and driver not in (None, recorded_driver):
            return f"they were measured with driver {recorded_driver}, and this machine has {driver}"
        return None
    there = environment.get("cpu"), environment.get("cores")
    here = cpu_model(), physical_cores()
    if None in there or there == here:
        return None
    return f"they were measured on {there[0]} with {there[1]} cores, and this machine is {here[0]} with {here[1]}"


def other_launcher(environment: LaunchEnvironment, launcher: Launcher, ranks: int) -> str | None:
    """Return how this launcher would start a group of `ranks` otherwise than a record's ranks were started, or None."""
    name = environment.get("launcher")
    if name not in (None, launcher.name):
        return f"they were launched by {name}, and this command launches by {launcher.name}"
    threads = environment.get("threads")
    now = os.environ.get("OMP_NUM_THREADS") or launcher.variables(ranks).get("OMP_NUM_THREADS")
    if threads is not None and now is not None and now.partition(",")[0] != str(threads):  # 2,1 is of nested regions
        return f"they were measured with OMP_NUM_THREADS={threads}, which is {now} now"
    return None
