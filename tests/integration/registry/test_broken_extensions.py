"""Commands beside distributions whose entry points are broken."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

from tests.support.distributions import write_distribution


def list_kind(kind: str, path: Path) -> subprocess.CompletedProcess[str]:
    """List what there is of a kind, with the distribution in `path` installed, as a user does."""
    command = [sys.executable, "-m", "benchbox.cli.app", "list", kind]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=variables, cwd=path, capture_output=True, text=True, timeout=60)


def test_a_command_fails_in_one_line_only_if_it_needs_what_is_broken(tmp_path: Path) -> None:
    """The line says which distribution; a command about something else runs."""
    write_distribution(tmp_path, "acme", "benchbox.backends", {"acme": "acme_absent:ACME"})
    failed = list_kind("backends", tmp_path)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        "error: acme, entry point benchbox.backends: acme: acme_absent:ACME cannot be loaded: ModuleNotFoundError: "
        "No module named 'acme_absent'; update or repair acme, or pip uninstall it\n"
    )
    assert list_kind("recipes", tmp_path).returncode == 0


def test_a_backend_without_a_recogniser_is_refused(tmp_path: Path) -> None:
    """Every cell of it would end as mismatch, after its launch."""
    (tmp_path / "acme_backend.py").write_text(
        "from benchbox.registry.backends import BackendInfo\nACME = BackendInfo(name='acme', summary='', target='x:Y')\n"
    )
    write_distribution(tmp_path, "acme", "benchbox.backends", {"acme": "acme_backend:ACME"})
    failed = list_kind("backends", tmp_path)
    assert failed.returncode == 2
    assert (
        "acme_backend:ACME declares no recognise=, so that every cell of backend 'acme' would end as mismatch" in failed.stderr
    )


def test_a_policy_cannot_take_the_name_of_a_bundled_one(tmp_path: Path) -> None:
    folder = tmp_path / "acme_policies" / "pi05"
    folder.mkdir(parents=True)
    (folder / "policy.py").touch()
    (folder / "presets.yaml").write_text("tiny: {}\n")
    write_distribution(tmp_path, "acme", "benchbox.policies", {"acme": "acme_policies"})
    failed = list_kind("policies", tmp_path)
    assert failed.returncode == 2
    assert failed.stderr == (
        f"error: {folder}: a policy named 'pi05' exists already, bundled with benchbox; "
        "rename it, or uninstall the package that holds it\n"
    )
