"""Checks of this machine, with a remedy for each that fails."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GIB = 1 << 30
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")
SLOW = 2.0  # times as long as in float32, from which on products in bfloat16 are emulated


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: `missing` is required by every cell, `warn` only by some."""

    state: Literal["ok", "warn", "missing"]
    name: str
    detail: str
    remedy: str = ""


def check_machine(machine: Mapping[str, Any]) -> Iterator[Check]:
    """Yield every check, given the facts of `measure.environment`."""
    yield Check("ok", "python", f"{machine['python']} ({sys.executable})")
    for package in PACKAGES:
        yield _package(package, machine[package])
    yield from _devices(machine)
    if not machine["devices"]:
        yield _bfloat16()
    yield from _free_space(machine)
    yield from _compiler()
    yield _extension(machine)
    yield from _collectives(machine)
    yield _video()


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
        devices = ", ".join(f"{name} ({gib:.0f} GiB)" for name, gib in zip(names, memory, strict=True))
        yield Check("ok", "devices", f"{devices}; driver {machine['driver']}, CUDA {machine['cuda']}")
    elif machine["driver"]:
        remedy = "install a torch built for CUDA, or a driver that is new enough for this torch"
        yield Check(
            "warn", "devices", f"driver {machine['driver']} is installed, but torch {machine['torch']} sees no GPU", remedy
        )
    else:
        yield Check("ok", "devices", "none: ranks are processes on the CPU")


def _bfloat16() -> Check:
    """Check whether the processor has instructions for bfloat16: where it has none, products are many times slower."""
    from benchbox.measure.peaks import bfloat16_slowdown

    slowdown = bfloat16_slowdown()
    detail = f"products take {slowdown:.2g} times as long as in float32"
    if slowdown < SLOW:
        return Check("ok", "bfloat16", detail)
    remedy = "recipe=fp32 is faster here, and times of other recipes say nothing about machines that compute in bfloat16"
    return Check("warn", "bfloat16", detail, remedy)


def _free_space(machine: Mapping[str, Any]) -> Iterator[Check]:
    import psutil

    free = psutil.virtual_memory().available
    detail = f"{free / GIB:.1f} of {machine['memory_bytes'] / GIB:.1f} GiB free"
    yield _space_check("memory", free, 4, detail, "end other programs, or use size=tiny and two ranks")
    for name, path, gib, remedy in (
        ("shared memory", Path("/dev/shm"), 1, "in a container: --shm-size=2g; ranks and data workers exchange tensors there"),  # noqa: S108
        ("disk", Path.cwd(), 1, "run on a disk with more space, or give --out"),
    ):
        if path.is_dir():
            space = shutil.disk_usage(path).free
            yield _space_check(name, space, gib, f"{space / GIB:.1f} GiB free in {path}", remedy)


def _space_check(name: str, free: int, required_gib: int, detail: str, remedy: str) -> Check:
    return Check("ok", name, detail) if free >= required_gib * GIB else Check("warn", name, detail, remedy)


def _compiler() -> Iterator[Check]:
    """Check for the tools on the PATH of ranks with which DeepSpeed compiles its extension when it is first used."""
    from benchbox.launch.process.environment import tool_path

    for name, tool, remedy in (
        ("compiler", os.environ.get("CXX", "g++"), "install g++: zero1, zero2 and zero3 need it"),
        ("ninja", "ninja", "pip install ninja: zero1, zero2 and zero3 need it"),
    ):
        path = shutil.which(tool, path=tool_path(os.environ))
        yield Check("ok", name, path) if path else Check("warn", name, f"no {tool}", remedy)


def _extension(machine: Mapping[str, Any]) -> Check:
    """Check whether DeepSpeed's CPU extension is compiled. The first launch that needs it compiles it otherwise."""
    from benchbox.backends.extension import extension_file

    if machine["devices"]:
        return Check("ok", "extension", "not needed: on GPUs DeepSpeed communicates by NCCL")
    file = extension_file(Path(rank_variables()["TORCH_EXTENSIONS_DIR"]))
    if file.exists():
        return Check("ok", "extension", str(file))
    detail = "not compiled: the first launch of zero1, zero2 or zero3 compiles it, once per environment"
    return Check("warn", "extension", detail, "benchbox doctor --compile")


def rank_variables() -> dict[str, str]:
    """Return the environment variables of a rank that are the same for all ranks of this host."""
    from benchbox.launch.process.environment import rank_environment

    return rank_environment(os.environ, {})


def _collectives(machine: Mapping[str, Any]) -> Iterator[Check]:
    import torch.distributed

    remedy = "install a torch with torch.distributed: ranks cannot communicate without it"
    if not torch.distributed.is_available():
        yield Check("missing", "collectives", "torch.distributed is not built in", remedy)
        return
    if machine["devices"]:
        available = torch.distributed.is_nccl_available()
        yield Check("ok", "nccl", str(machine["nccl"])) if available else Check("missing", "nccl", "not built in", remedy)
    available = torch.distributed.is_gloo_available()
    yield Check("ok", "gloo", "built in") if available else Check("missing", "gloo", "not built in", remedy)


def _video() -> Check:
    """Check the video codecs: LeRobot datasets are H.264 or AV1, and `benchbox data record` writes H.264."""
    from av.codec import Codec
    from av.codec.codec import UnknownCodecError

    from benchbox.data.video.files import CODEC

    missing = []
    for name, mode, use in (("h264", "r", "reading"), ("av1", "r", "reading"), (CODEC, "w", "writing")):
        try:
            Codec(name, mode)
        except UnknownCodecError:
            missing.append(f"{use} {name}")
    if missing:
        return Check("warn", "video", f"PyAV has no codec for {', '.join(missing)}", "pip install --only-binary av av")
    return Check("ok", "video", f"reads h264 and av1, writes {CODEC}")
