"""`benchbox doctor`: whether this machine can run cells, and what to do where it cannot."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from benchbox.errors import EXIT_CELL_FAILED

GIB = 1 << 30
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination: `missing` is needed for cells to run, `warn` is needed by some of them."""

    state: Literal["ok", "warn", "missing"]
    name: str
    found: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor() -> None:
    """Examine this machine. Exits with 3, as a run would, when something that every cell needs is missing."""
    from benchbox.measure.environment import environment

    checks = list(check_machine(environment()))
    for check in checks:
        print(f"{check.state:<9}{check.name:<15}{check.found}")
        if check.remedy:
            print(f"{'':<9}{'':<15}-> {check.remedy}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(EXIT_CELL_FAILED)


def check_machine(machine: Mapping[str, Any]) -> Iterator[Check]:
    """Every check, given the facts of `measure.environment`."""
    yield Check("ok", "python", f"{machine['python']} ({sys.executable})")
    for package in PACKAGES:
        yield _package(package, machine[package])
    yield from _devices(machine)
    yield from _room(machine)
    yield from _compiler()
    yield from _collectives(machine)
    yield _video()
    yield _browser()


def _package(name: str, version: str | None) -> Check:
    if version:
        return Check("ok", name, version)
    return Check("missing", name, "not installed", f"pip install -c constraints.txt {name}")


def _devices(machine: Mapping[str, Any]) -> Iterator[Check]:
    import torch

    names = machine["devices"]
    yield Check("ok", "processor", f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable")
    if names:
        memory = [torch.cuda.get_device_properties(index).total_memory / GIB for index in range(len(names))]
        each = ", ".join(f"{name} ({gib:.0f} GiB)" for name, gib in zip(names, memory, strict=True))
        yield Check("ok", "devices", f"{each}; driver {machine['driver']}, CUDA {machine['cuda']}")
    elif machine["driver"]:
        remedy = "install a torch built for CUDA, or a driver that is new enough for this one"
        yield Check("warn", "devices", f"driver {machine['driver']} is there, and torch {machine['torch']} sees no GPU", remedy)
    else:
        yield Check("ok", "devices", "none: ranks are processes on the CPU")


def _room(machine: Mapping[str, Any]) -> Iterator[Check]:
    import psutil

    free = psutil.virtual_memory().available
    found = f"{free / GIB:.1f} of {machine['memory_bytes'] / GIB:.1f} GiB free"
    yield _enough("memory", free, 4, found, "end other programs, or keep to size=tiny and two ranks")
    for name, path, gib, remedy in (
        ("shared memory", Path("/dev/shm"), 1, "in a container: --shm-size=2g; ranks and data workers exchange tensors there"),  # noqa: S108
        ("disk", Path.cwd(), 1, "run where there is room, or give --out"),
    ):
        if path.is_dir():
            space = shutil.disk_usage(path).free
            yield _enough(name, space, gib, f"{space / GIB:.1f} GiB free in {path}", remedy)


def _enough(name: str, free: int, gib: int, found: str, remedy: str) -> Check:
    return Check("ok", name, found) if free >= gib * GIB else Check("warn", name, found, remedy)


def _compiler() -> Iterator[Check]:
    """DeepSpeed compiles a small operation when it is first used, with the tools that ranks find on their PATH."""
    from benchbox.launch.process.environment import tool_path

    for name, tool, remedy in (
        ("compiler", os.environ.get("CXX", "g++"), "install g++: zero1, zero2 and zero3 need it"),
        ("ninja", "ninja", "pip install ninja: zero1, zero2 and zero3 need it"),
    ):
        where = shutil.which(tool, path=tool_path(os.environ))
        yield Check("ok", name, where) if where else Check("warn", name, f"no {tool}", remedy)


def _collectives(machine: Mapping[str, Any]) -> Iterator[Check]:
    import torch.distributed

    remedy = "install a torch with torch.distributed: no rank can meet another without it"
    if not torch.distributed.is_available():
        yield Check("missing", "collectives", "torch.distributed is not built in", remedy)
        return
    if machine["devices"]:
        there = torch.distributed.is_nccl_available()
        yield Check("ok", "nccl", str(machine["nccl"])) if there else Check("missing", "nccl", "not built in", remedy)
    there = torch.distributed.is_gloo_available()
    yield Check("ok", "gloo", "built in") if there else Check("missing", "gloo", "not built in", remedy)


def _video() -> Check:
    """LeRobot datasets hold H.264 or AV1; what `benchbox data record` writes is H.264."""
    from av.codec import Codec
    from av.codec.codec import UnknownCodecError

    from benchbox.data.video import CODEC

    lacking = []
    for name, mode, use in (("h264", "r", "reading"), ("av1", "r", "reading"), (CODEC, "w", "writing")):
        try:
            Codec(name, mode)
        except UnknownCodecError:
            lacking.append(f"{use} {name}")
    if lacking:
        return Check("warn", "video", f"PyAV has nothing for {', '.join(lacking)}", "pip install --only-binary av av")
    return Check("ok", "video", f"reads h264 and av1, writes {CODEC}")


def _browser() -> Check:
    where = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Check("ok", "browser", where or "no Chromium: only the browser tests of benchbox itself need one")
