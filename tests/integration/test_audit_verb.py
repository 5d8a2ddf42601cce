"""`benchbox audit-precision`, run as a user runs it, on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.ranks


def audit(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--policy", "pi05", "--steps", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def audited(exit_code: int, *options: str) -> dict[str, Any]:
    done = audit(*options, "--format", "json")
    assert done.returncode == exit_code, done.stderr
    return dict(json.loads(done.stdout))


def dtypes(report: dict[str, Any], kind: str) -> set[str]:
    return {entry["dtype"] for entry in report["census"] if entry["kind"] == kind}


def test_pure_bfloat16_under_ddp_is_found_out_on_every_rank():
    """The bug of OpenTau#181: parameters and both moments in bfloat16, beta2 at torch's default."""
    report = audited(4, "--backend", "ddp", "--recipe", "bf16_pure", "--beta2", "0.999")
    assert [(finding["code"], finding["severity"]) for finding in report["findings"]] == [
        ("BXP101", "error"),
        ("BXP201", "error"),
    ]
    assert all(finding["evidence"]["ranks"] == [0, 1] for finding in report["findings"])
    assert dtypes(report, "exp_avg_sq") == dtypes(report, "gradient") == {"bfloat16"}
    assert dtypes(report, "master") == set()


def test_a_low_beta2_lets_the_second_moment_decay_and_the_text_says_what_is_wrong():
    done = audit("--backend", "single", "--recipe", "bf16_pure", "--beta2", "0.95")
    assert done.returncode == 4
    assert "BXP101 error" in done.stdout
    assert "clean: BXP201" in done.stdout
    assert done.stderr.splitlines() == ["error: single with bf16_pure does not pass BXP101"]
    assert "0      exp_avg_sq  bfloat16  cpu" in done.stdout


@pytest.mark.parametrize(
    ("backend", "master"),
    [("ddp", "master"), ("zero2", "master"), ("fsdp2", "parameter")],
)
def test_float32_masters_are_clean_wherever_a_backend_keeps_them(backend, master):
    """Even at beta2 0.999. DDP and ZeRO step masters beside the live parameters; FSDP steps the live ones, cast to compute."""
    report = audited(0, "--backend", backend, "--recipe", "bf16_master", "--beta2", "0.999")
    assert report["findings"] == []
    assert dtypes(report, master) == dtypes(report, "exp_avg") == dtypes(report, "exp_avg_sq") == {"float32"}
    held = [entry["elements"] for entry in report["census"] if entry["kind"] == master]
    whole = 2 if backend == "ddp" else 1
    assert sum(held) == pytest.approx(whole * report["observed"]["total_numel"], rel=0.01), "shards make up the whole policy"


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ("--backend ddpp --recipe fp32", 2, "unknown backend 'ddpp'; did you mean 'ddp'?"),
        ("--backend ddp --recipe bf16", 2, "--recipe: unknown recipe 'bf16'; did you mean 'bf16_pure'?"),
        ("--backend ddp --recipe fp32 --size tinny", 2, "--size: policy pi05 has no size 'tinny'; did you mean 'tiny'?"),
        ("--backend ddp --recipe fp32 --beta2 1", 2, "--beta2: 1.0 would never forget a gradient; give a value below 1"),
        ("--backend single --recipe fp32 --world-size 2", 3, "single runs on at most 1 rank, and world_size is 2"),
    ],
)
def test_bad_input_is_one_line(options, code, line):
    done = audit(*options.split())
    assert (done.returncode, done.stderr.splitlines()) == (code, [f"error: {line}"])
