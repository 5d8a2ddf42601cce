"""`benchbox doctor`: checks of this machine, with a remedy for each that fails."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchbox.cli.links import measure_and_keep
from benchbox.cli.peaks import measure_and_keep_peaks
from benchbox.errors import EXIT_CELL_FAILED, CellFailedError, ConfigurationError

GIB = 1 << 30
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: `missing` is required by every cell, `warn` only by some."""

    state: Literal["ok", "warn", "missing"]
    name: str
    detail: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    compile_extension: Annotated[
        bool, typer.Option("--compile", help="Compile DeepSpeed's CPU extension now, so that no launch has to.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Measure the links between ranks of this machine, for benchbox estimate.")
    ] = False,
    peaks: Annotated[
        bool,
        typer.Option("--peaks", help="Measure what ranks reach in products, copies and all-reduces, for benchbox profile."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="With --links or --peaks: ranks.", show_default="GPUs, or 2 on the CPU"),
    ] = None,
) -> None:
    """Check this machine. Exits with 3, as a run would, when something that every cell needs is missing.

    With --links, all-reduce, all-gather, reduce-scatter and broadcast of 1 KiB to 64 MiB are timed instead, and latency and
    bandwidth are fitted to each. With --peaks, ranks that all work at once measure FLOP/s of matrix products by dtype and class
    of shape, and bytes/s of copies and all-reduces. Both are kept in the user's cache, by machine.
    """
    from benchbox.measure.environment import environment

    machine = environment()
    if ranks is not None and not (links or peaks):
        raise ConfigurationError("--ranks is for --links and --peaks: the checks start no ranks")
    if links or peaks:
        group = len(machine["devices"]) or 2 if ranks is None else ranks
        if links:
            measure_and_keep(machine["machine"], group)
        if peaks:
            measure_and_keep_peaks(machine["machine"], group)
        return
    if compile_extension and not machine["devices"]:
        _compile_extension()
    checks = list(check_machine(machine))
    for check in checks:
        print(f"{check.state:<9}{check.name:<15}{check.detail}")
        if check.remedy:
            print(f"{'':<9}{'':<15}-> {check.remedy}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(EXIT_CELL_FAILED)


def check_machine(machine: Mapping[str, Any]) -> Iterator[Check]:
    """Yield every check, given the facts of `measure.environment`."""
    yield Check("ok", "python", f"{machine['python']} ({sys.executable})")
    for package in PACKAGES:
        yield _package(package, machine[package])
    yield from _devices(machine)
    yield from _free_space(machine)
    yield from _compiler()
    yield _extension(machine)
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
        devices = ", ".join(f"{name} ({gib:.0f} GiB)" for name, gib in zip(names, memory, strict=True))
        yield Check("ok", "devices", f"{devices}; driver {machine['driver']}, CUDA {machine['cuda']}")
    elif machine["driver"]:
        remedy = "install a torch built for CUDA, or a driver that is new enough for this torch"
        yield Check(
            "warn", "devices", f"driver {machine['driver']} is installed, but torch {machine['torch']} sees no GPU", remedy
        )
    else:
        yield Check("ok", "devices", "none: ranks are processes on the CPU")


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
    file = extension_file(Path(_rank_variables()["TORCH_EXTENSIONS_DIR"]))
    if file.exists():
        return Check("ok", "extension", str(file))
    detail = "not compiled: the first launch of zero1, zero2 or zero3 compiles it, once per environment"
    return Check("warn", "extension", detail, "benchbox doctor --compile")


def _compile_extension() -> None:
    """Compile DeepSpeed's CPU extension in a process with the environment variables of a rank.

    Raises:
        CellFailedError: it cannot be compiled; the output of the compiler is on stderr.
    """
    from benchbox.registry.phases import STAGE_TEXTS

    print(STAGE_TEXTS["compile_extension"], flush=True)
    command = [sys.executable, "-c", "from benchbox.backends.extension import build_extension; build_extension()"]
    if subprocess.run(command, env=_rank_variables() | {"DS_ACCELERATOR": "cpu"}, stdout=sys.stderr, check=False).returncode:
        raise CellFailedError("DeepSpeed's CPU extension could not be compiled: the output of the compiler is above")


def _rank_variables() -> dict[str, str]:
    from benchbox.launch.process.environment import host_variables

    return {**os.environ, **host_variables(os.environ)}


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


def _browser() -> Check:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Check("ok", "browser", path or "no Chromium: only the browser tests of benchbox itself need one")
