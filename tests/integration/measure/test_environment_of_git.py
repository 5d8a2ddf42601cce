"""The recorded environment of a real git checkout."""

from __future__ import annotations

import subprocess

from benchbox.measure.environment import environment


def test_git_state_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    for command in (
        ["init", "--quiet"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", *command], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment()["git"] == {"commit": head, "dirty": False}
    (tmp_path / "new").write_text("1")
    subprocess.run(["git", "add", "new"], check=True)
    assert environment()["git"] == {"commit": head, "dirty": True}
