from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from av.codec.codec import UnknownCodecError

from benchbox.cli import doctor, machine_checks
from benchbox.data.video.files import CODEC
from benchbox.errors import CellFailedError, ConfigurationError
from benchbox.measure.environment import environment


@pytest.fixture(scope="module")
def machine():
    return environment()


def checks_by_name(machine, **changes):
    return {check.name: check for check in machine_checks.check_machine({**machine, **changes})}


def test_a_package_that_is_not_installed_is_needed(machine):
    check = checks_by_name(machine, deepspeed=None)["deepspeed"]
    assert (check.state, check.detail) == ("missing", "not installed")
    assert check.remedy == "pip install -c constraints.txt deepspeed"


def test_a_missing_requirement_ends_with_exit_code_3(machine, monkeypatch, capsys):
    monkeypatch.setattr("benchbox.measure.environment.environment", lambda: {**machine, "accelerate": None})
    with pytest.raises(typer.Exit) as exited:
        doctor.doctor()
    assert exited.value.exit_code == 3
    assert "missing  accelerate     not installed\n" in capsys.readouterr().out


def test_the_extension_is_compiled_before_links_are_measured_if_both_are_asked_for(machine, monkeypatch):
    done = []
    monkeypatch.setattr("benchbox.measure.environment.environment", lambda: {**machine, "devices": []})
    monkeypatch.setattr(doctor, "_compile_extension", lambda: done.append("compiled"))
    monkeypatch.setattr(doctor, "measure_and_keep", lambda _, ranks: done.append(f"measured {ranks}"))
    doctor.doctor(compile_extension=True, links=True)
    assert done == ["compiled", "measured 2"]


def test_a_driver_without_a_torch_that_sees_its_devices_is_a_warning_with_a_remedy(machine):
    check = checks_by_name(machine, driver="580.1", devices=[])["devices"]
    assert check.state == "warn"
    assert "580.1" in check.detail
    assert "CUDA" in check.remedy


def test_devices_are_named_with_their_memory_and_nccl_is_then_required(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * machine_checks.GIB))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    checks = checks_by_name(machine, devices=["NVIDIA H200"], driver="580.1", cuda="13.0")
    assert checks["devices"].detail == "NVIDIA H200 (141 GiB); driver 580.1, CUDA 13.0"
    assert checks["nccl"].state == "missing"


def test_without_a_compiler_zero_cannot_run_and_others_can(machine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert checks_by_name(machine)["compiler"].state == "warn"


def test_ninja_is_found_beside_the_interpreter_where_ranks_find_it_too(machine, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert checks_by_name(machine)["ninja"].state == "ok"


def test_an_extension_that_is_not_compiled_is_a_warning_with_a_remedy(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    check = checks_by_name(machine)["extension"]
    assert (check.state, check.remedy) == ("warn", "benchbox doctor --compile")
    assert "compiles it, once per environment" in check.detail


def test_a_compiled_extension_is_named_with_its_path(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    file.parent.mkdir()
    file.touch()
    check = checks_by_name(machine)["extension"]
    assert (check.state, check.detail) == ("ok", str(file))


def test_a_full_disk_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    checks = checks_by_name(machine)
    assert [checks[name].state for name in ("disk", "shared memory")] == ["warn", "warn"]


def test_ranks_are_refused_where_the_checks_start_none():
    with pytest.raises(ConfigurationError, match="--ranks is for --links and --peaks"):
        doctor.doctor(ranks=2)


def test_links_are_between_two_ranks_at_least():
    with pytest.raises(ConfigurationError, match="--ranks 1: a link is between at least two ranks"):
        doctor.doctor(links=True, ranks=1)


def test_ranks_that_cannot_communicate_are_missing_a_requirement(machine, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert checks_by_name(machine)["gloo"].state == "missing"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    checks = checks_by_name(machine, devices=[])
    assert (checks["collectives"].state, checks["collectives"].detail) == ("missing", "torch.distributed is not built in")
    assert "gloo" not in checks


def test_codecs_that_pyav_lacks_are_named_with_their_use(machine, monkeypatch):
    def codec(name, mode):
        if name == "av1" or mode == "w":
            raise UnknownCodecError(name)

    assert checks_by_name(machine)["video"].state == "ok"
    monkeypatch.setattr("av.codec.Codec", codec)
    check = checks_by_name(machine)["video"]
    assert (check.state, check.detail) == ("warn", f"PyAV has no codec for reading av1, writing {CODEC}")


@pytest.mark.parametrize(("slowdown", "state", "factor"), [(0.62, "ok", "0.62"), (31.4, "warn", "31")])
def test_a_processor_without_instructions_for_bfloat16_is_a_warning(machine, monkeypatch, slowdown, state, factor):
    monkeypatch.setattr("benchbox.measure.peaks.bfloat16_slowdown", lambda: slowdown)
    check = checks_by_name(machine, devices=[])["bfloat16"]
    assert (check.state, check.detail) == (state, f"products take {factor} times as long as in float32")
    assert ("recipe=fp32 is faster here" in check.remedy) == (state == "warn")


def test_gpus_need_no_extension_and_no_instructions_of_the_processor(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * machine_checks.GIB))
    checks = checks_by_name(machine, devices=["NVIDIA H200"])
    check = checks["extension"]
    assert "bfloat16" not in checks
    assert (check.state, check.detail) == ("ok", "not needed: on GPUs DeepSpeed communicates by NCCL")


def test_an_extension_that_does_not_compile_ends_with_exit_code_3(machine, monkeypatch, capsys):
    """Compiled on request only, and not where there are GPUs."""
    commands = []

    def failing(command, **options):
        commands.append((command, options["env"]["DS_ACCELERATOR"]))
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr("benchbox.measure.environment.environment", lambda: {**machine, "devices": []})
    monkeypatch.setattr(doctor.subprocess, "run", failing)
    with pytest.raises(CellFailedError, match="extension could not be compiled") as failed:
        doctor.doctor(compile_extension=True)
    assert failed.value.exit_code == 3
    ((command, accelerator),) = commands
    assert (command[0], command[-1].rpartition("; ")[2], accelerator) == (sys.executable, "build_extension()", "cpu")
    assert "missing" not in capsys.readouterr().out
