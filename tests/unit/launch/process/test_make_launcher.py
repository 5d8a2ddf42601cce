"""Launchers by their names."""

from __future__ import annotations

import sys

import pytest

from benchbox.launch.process import make_launcher
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.warm import ForkServerLauncher


@pytest.mark.parametrize(
    ("platform", "name", "kind"),
    [
        ("linux", "local", ForkServerLauncher),
        ("linux", "torchrun", TorchrunLauncher),
        ("darwin", "local", TorchrunLauncher),
    ],
)
def test_ranks_are_forked_where_that_is_safe_and_torchrun_was_not_asked_for(
    platform: str, name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert type(make_launcher(name)) is kind
