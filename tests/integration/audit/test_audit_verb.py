"""Tests of `benchbox audit-precision` on sessions with real ranks and on checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
import torch

from tests.support.commands import run_in_process

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.ranks


def audit(*options: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("audit-precision", "--policy", "pi05", "--steps", "1", *options)


def audited(exit_code: int, *options: str) -> dict[str, Any]:
    done = audit(*options, "--format", "json")
    assert done.returncode == exit_code, done.stderr
    return dict(json.loads(done.stdout))


def dtypes(report: dict[str, Any], kind: str) -> set[str]:
    return {entry["dtype"] for entry in report["census"] if entry["kind"] == kind}


def test_pure_bfloat16_under_ddp_is_found_on_every_rank():
    """The bug of OpenTau#181: parameters and both moments in bfloat16, beta2 at torch's default."""
    report = audited(4, "--backend", "ddp", "--recipe", "bf16_pure", "--beta2", "0.999")
    errors = {finding["code"]: finding for finding in report["findings"] if finding["severity"] == "error"}
    assert errors.keys() >= {"BXP101", "BXP201"}
    assert errors["BXP101"]["evidence"]["ranks"] == errors["BXP201"]["evidence"]["ranks"] == [0, 1]
    assert dtypes(report, "exp_avg_sq") == dtypes(report, "gradient") == {"bfloat16"}
    assert dtypes(report, "master") == set()


def test_a_low_beta2_lets_the_second_moment_decay_and_the_text_says_what_is_wrong():
    done = audit("--backend", "single", "--recipe", "bf16_pure", "--beta2", "0.95")
    assert done.returncode == 4
    assert "BXP101 error" in done.stdout
    (clean,) = (line for line in done.stdout.splitlines() if line.startswith("clean: "))
    assert "BXP201" in clean
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: single with bf16_pure does not pass BXP101")
    assert "0      exp_avg_sq  bfloat16  cpu" in done.stdout


@pytest.mark.parametrize(
    ("backend", "master"),
    [("ddp", "master"), ("zero2", "master"), ("fsdp2", "parameter")],
)
def test_float32_masters_pass_wherever_a_backend_keeps_them(backend, master):
    """Even at beta2 0.999. DDP and ZeRO step masters beside the live parameters; FSDP steps the live ones, cast to compute."""
    report = audited(0, "--backend", backend, "--recipe", "bf16_master", "--beta2", "0.999")
    assert {finding["severity"] for finding in report["findings"]} <= {"info"}
    assert dtypes(report, master) == dtypes(report, "exp_avg") == dtypes(report, "exp_avg_sq") == {"float32"}
    elements = [entry["elements"] for entry in report["census"] if entry["kind"] == master]
    copies = 2 if backend == "ddp" else 1
    total = report["subject"]["observed"]["total_numel"]
    assert sum(elements) == pytest.approx(copies * total, rel=0.01), "shards make up the whole policy"


def test_the_options_of_a_session_are_those_of_its_cell_and_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    """In place of the launch, which Ctrl-C ends."""
    launched = []

    def launch(cell, measure, *, folder, **_):
        folder.mkdir()
        launched.append((cell.world_size, cell.data.kind, measure.steps))
        error = {"type": "Interrupted", "message": "the launch was stopped", "rank": None, "phase": None}
        return {"status": "interrupted", "error": error}

    monkeypatch.setattr("benchbox.launch.launch.launch_cell", launch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session = ("audit-precision", "--policy", "pi05", "--backend", "ddp", "--recipe", "fp32")
    for options in ((), ("--world-size", "3", "--data", "sample", "--steps", "7")):
        done = run_in_process(*session, *options)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert launched == [(2, "synthetic", 3), (3, "sample", 7)]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def checkpoint(tmp_path):
    """Save a checkpoint of a training in pure bfloat16."""
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def audit_checkpoint(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("audit-precision", "--checkpoint", path, *options)


def test_a_checkpoint_is_audited_and_findings_of_a_baseline_do_not_fail_again(checkpoint, tmp_path):
    without_baseline = audit_checkpoint(checkpoint, "--format", "json")
    assert (without_baseline.returncode, without_baseline.stderr) == (4, f"error: {checkpoint} does not pass BXP101, BXP201\n")
    assert json.loads(without_baseline.stdout)["subject"]["path"] == str(checkpoint)
    (tmp_path / "before.json").write_text(without_baseline.stdout)
    with_baseline = audit_checkpoint(checkpoint, "--baseline", str(tmp_path / "before.json"))
    assert (with_baseline.returncode, with_baseline.stderr) == (0, "")
    assert "known: BXP101" in with_baseline.stdout


def test_a_checkpoint_of_weights_alone_says_that_the_precision_of_training_was_not_judged(checkpoint, tmp_path):
    torch.save(torch.load(checkpoint)["model"], tmp_path / "weights.pt")
    done = audit_checkpoint(tmp_path / "weights.pt")
    assert (done.returncode, "found: nothing" in done.stdout) == (0, True)
    assert done.stderr == "benchbox: no optimizer state: the precision of training was not judged\n"


def test_a_checkpoint_is_compared_with_the_precision_that_a_recipe_declares(checkpoint):
    for recipe, is_found in (((), False), (("--recipe", "fp32"), True)):
        report = json.loads(audit_checkpoint(checkpoint, *recipe, "--format", "json").stdout)
        assert ("BXP604" in {finding["code"] for finding in report["findings"]}) is is_found


def test_rules_are_selected_by_code_and_suppressed_for_parameters_with_a_reason(checkpoint, tmp_path):
    silent = tmp_path / "silent.yaml"
    silent.write_text('suppress:\n  - {rule: BXP201, parameters: "*", reason: "the run is over in ten steps"}\n')
    done = audit_checkpoint(checkpoint, "--select", "BXP1,BXP201", "--ignore", "bxp101", "--suppressions", str(silent))
    assert (done.returncode, done.stderr) == (0, "")
    assert "the run is over in ten steps" in done.stdout
    assert "BXP101" not in done.stdout


@pytest.mark.parametrize(("form", "read"), [("sarif", json.loads), ("junit", ET.fromstring)])
def test_programs_get_one_complete_document(checkpoint, form, read):
    done = audit_checkpoint(checkpoint, "--format", form)
    assert done.returncode == 4
    read(done.stdout)
    assert "BXP101" in done.stdout


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("", "nothing to audit: give --policy, --backend and --recipe, or --checkpoint PATH, or -- and a training command"),
        ("--policy pi05 --recipe fp32", "--backend: a session needs it; give --policy, --backend and --recipe"),
        ("--stop --checkpoint x", "--stop: goes with a command; give one: -- torchrun train.py"),
        ("--checkpoint x -- python y", "--checkpoint: a command is given as well; audit one after the other"),
        (
            "--checkpoint x --steps 3",
            "--steps: goes with a session or a command; a checkpoint takes no steps",
        ),
        ("--size tiny -- python y", "--size: goes with a session of benchbox; leave it out: a command is audited as it is"),
        (
            "--policy-dir x -- python y",
            "--policy-dir: goes with a session of benchbox; leave it out: a command is audited as it is",
        ),
        (
            "--launcher torchrun --checkpoint x",
            "--launcher: goes with a session of benchbox; leave it out: a checkpoint is audited as it is",
        ),
        ("--recipe fp23 -- python y", "--recipe: unknown recipe 'fp23'; did you mean 'fp32'?"),
        ("--select BXP109 -- python y", "--select: no rule is called 'BXP109'; did you mean 'BXP107'?"),
        ("--checkpoint nowhere", "nowhere: no such file or directory"),
    ],
)
def test_no_subject_or_two_of_them_are_refused_in_one_line(options, line):
    done = run_in_process("audit-precision", *options.split())
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [f"error: {line}"])


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ("--backend ddpp --recipe fp32", 2, "unknown backend 'ddpp'; did you mean 'ddp'?"),
        ("--backend ddp --recipe bf16", 2, "--recipe: unknown recipe 'bf16'; did you mean 'bf16_pure'?"),
        ("--backend ddp --recipe fp32 --size tinny", 2, "--size: policy pi05 has no size 'tinny'; did you mean 'tiny'?"),
        ("--backend ddp --recipe fp32 --beta2 1", 2, "--beta2: 1.0 would never forget a gradient; give a value below 1"),
        (
            "--backend single --recipe fp32 --world-size 2",
            2,
            "--world-size: single runs on at most 1 rank, and world_size is 2",
        ),
        ("--backend ddp --recipe fp32 --world-size 1", 2, "--world-size: ddp needs at least 2 ranks, and world_size is 1"),
        (
            "--backend zero2 --recipe bf16_kahan",
            3,
            "zero2 has no bf16_kahan recipe: DeepSpeed steps flat tensors of its own in place of the bfloat16 parameters",
        ),
    ],
)
def test_bad_input_is_one_line(options, code, line):
    done = audit(*options.split())
    assert (done.returncode, done.stderr.splitlines()) == (code, [f"error: {line}"])
