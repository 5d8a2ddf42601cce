"""Launches on the device: forked and new ranks alike, their records complete, failures of memory typed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.analysis.invariants import verify_records
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from benchbox.worker.device_files import CUDA_DRIVER_FILE
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.launch.job import Launcher
    from benchbox.registry.launch_record import LaunchRecord

pytestmark = pytest.mark.ranks

GIB = 2**30
MEASURE = MeasureSpec(warmup_steps=2, steps=6, launches=1, timeout_s=300.0)
# What NVML tells of a data-centre device. Values of other processes need a process namespace that is not a container's own.
NVML_FIELDS = ("utilisation", "sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons", "energy_j")


@pytest.fixture(scope="module")
def fork_server(device: torch.device) -> Iterator[ForkServerLauncher]:
    launcher = ForkServerLauncher()
    yield launcher
    launcher.close()


def launch(launcher: Launcher, folder: Path, **changes: Any) -> LaunchRecord:
    cell = tiny_cell(**{"backend": "single", "world_size": 1} | changes)
    return launch_cell(cell, MEASURE, launch=1, folder=folder, launcher=launcher)


@pytest.fixture(scope="module")
def records(
    fork_server: ForkServerLauncher, device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> list[LaunchRecord]:
    """One launch of new interpreters and two forked ones, of the same cell."""
    folder = tmp_path_factory.mktemp("launches")
    launchers = (TorchrunLauncher(), fork_server, fork_server)
    return [launch(launcher, folder / str(index), attention="eager") for index, launcher in enumerate(launchers)]


def test_forked_and_new_ranks_end_ok_on_the_device(records: list[LaunchRecord], device: torch.device) -> None:
    assert [record["status"] for record in records] == ["ok"] * 3, [record["error"] for record in records]
    names = ["torchrun", "fork_server", "fork_server"]
    assert [record["environment"]["launcher"] for record in records] == names
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    assert all(record["observed"]["device"] == [name] for record in records)


def test_records_of_the_device_violate_no_invariant(records: list[LaunchRecord]) -> None:
    """`benchbox verify` checks them in a report. In steps of a tiny policy the host leaves gaps between the phases."""
    violations = verify_records(records).violations
    assert [str(violation) for violation in violations if not violation.sentence.startswith("phases sum")] == []


def test_losses_of_forked_and_new_ranks_are_equal(records: list[LaunchRecord]) -> None:
    """Bit for bit, unless two forked launches differ from each other already, as kernels with atomic additions make them."""
    new, forked, repeated = (list(record["loss"]) for record in records)
    assert new[0] == forked[0] == repeated[0], "the first loss precedes every backward pass"
    if forked == repeated:
        assert new == forked
    else:
        assert new == pytest.approx(forked, rel=1e-2)


def open_files(pid: int) -> set[str]:
    return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}


def test_the_fork_server_has_not_initialised_cuda(
    cuda: torch.device, fork_server: ForkServerLauncher, records: list[LaunchRecord]
) -> None:
    """After it has forked ranks that did."""
    torch.ones(1, device=cuda)
    if CUDA_DRIVER_FILE not in open_files(os.getpid()):
        pytest.skip(f"this process uses CUDA and has not opened {CUDA_DRIVER_FILE}: it would prove nothing")
    servers = list(fork_server._servers.values())
    assert servers
    for server in servers:
        assert server.alive
        assert CUDA_DRIVER_FILE not in open_files(server._process.pid)


def test_a_record_has_memory_of_the_allocator_and_the_environment_of_cuda(
    cuda: torch.device, records: list[LaunchRecord]
) -> None:
    for record in records:
        memory, environment = record["memory"], record["environment"]
        assert memory["source"] == "torch.cuda"
        assert 0 < memory["worst"]["allocated_peak_bytes"] <= memory["worst"]["reserved_peak_bytes"]
        assert environment["devices"][0] == torch.cuda.get_device_name(cuda)
        assert environment["cuda"] == torch.version.cuda
        assert environment["driver"]
        assert environment["nccl"]


def test_a_record_has_what_nvml_tells_of_the_device(cuda: torch.device, records: list[LaunchRecord]) -> None:
    for record in records:
        host = record["host"]
        assert host["devices_reason"] is None
        (state,) = host["devices"]
        unknown = {key for key, value in state.items() if value is None}
        assert unknown <= set(state["reasons"]), "a null without a reason"
        assert not unknown & set(NVML_FIELDS), state["reasons"]
        for moment in ("start", "end"):
            assert 100 < state["sm_clock_mhz"][moment] < 5000
            assert 100 < state["memory_clock_mhz"][moment] < 20_000
            assert 10 < state["power_w"][moment] < 2000
            assert 10 < state["temperature_c"][moment] < 120
        assert 0 <= state["utilisation"] <= 1
        assert state["energy_j"] >= 0  # the counter advances several times a second, and these steps are short
        assert host["energy_j_per_sample"] == pytest.approx(state["energy_j"] / sum(record["samples"]))


def test_the_audit_of_a_launch_has_no_findings(records: list[LaunchRecord]) -> None:
    for record in records:
        assert record["precision"]["findings"] == []
        assert not record["precision"].get("problems")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_the_requested_kernel_runs_with_and_without_checkpointing(
    device: torch.device, fork_server: ForkServerLauncher, tmp_path: Path, attention: str, checkpointing: bool
) -> None:
    if attention == "flex" and device.type == "cpu":
        pytest.skip("FlexAttention has no backward on a CPU")
    record = launch(fork_server, tmp_path, attention=attention, checkpointing=checkpointing)
    assert record["status"] == "ok", record["error"]
    kernels = record["observed"]["attention_kernel"].split("+")
    assert attention in {kernel.split(":")[0] for kernel in kernels}
    assert bool(record["observed"]["checkpointed_modules"]) == checkpointing


@pytest.mark.parametrize("backend", ["ddp", "fsdp1_full", "fsdp2", "zero2", "zero3"])
def test_backends_run_over_two_devices(
    cuda: torch.device, fork_server: ForkServerLauncher, tmp_path: Path, backend: str
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and this machine has {torch.cuda.device_count()}")
    record = launch(fork_server, tmp_path, backend=backend, world_size=2)
    assert record["status"] == "ok", record["error"]


@pytest.mark.parametrize(
    ("free_gib", "changes", "stages"),
    [
        pytest.param(2, {"size": "full"}, {"build", "prepare"}, id="in construction"),
        pytest.param(6, {"size": "small", "batch": 256}, {"warmup"}, id="in a step"),
    ],
)
def test_running_out_of_memory_is_typed_and_does_no_harm_to_the_next_launch(
    cuda: torch.device,
    fork_server: ForkServerLauncher,
    tmp_path: Path,
    free_gib: int,
    changes: dict[str, Any],
    stages: set[str],
) -> None:
    """This process takes all memory of the device but 2 GiB, less than the weights, or 6 GiB, less than the activations."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(cuda)
    occupied = torch.empty(max(0, free - free_gib * GIB), dtype=torch.uint8, device=cuda)
    try:
        failed = launch(fork_server, tmp_path / "large", **changes)
    finally:
        del occupied
        torch.cuda.empty_cache()
    assert failed["status"] == "oom", failed["error"]
    assert failed["error"]["type"] in {"OutOfMemoryError", "AcceleratorError", "RuntimeError"}
    assert failed["error"]["stage"] in stages
    small = launch(fork_server, tmp_path / "small")
    assert small["status"] == "ok", small["error"]
