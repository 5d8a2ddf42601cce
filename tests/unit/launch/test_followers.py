"""Nodes other than node 0: they wait for it, and for the files of each launch that it announces."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import typer

from benchbox.cli.nodes import open_launcher
from benchbox.errors import ConfigurationError
from benchbox.launch.nodes.files import NodeFile, NodeLostError, NodeWatch
from benchbox.launch.nodes.follower import follow
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.store.files import write_json
from tests.support.nodes import NODES, job

if TYPE_CHECKING:
    from pathlib import Path


def test_a_node_that_comes_before_node_0_waits_in_a_folder_that_it_creates(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="node 0 has not reported here"):
        follow(tmp_path / "runs" / "m", replace(NODES, rank=1, timeout_s=0.0), stop=lambda: False, on_line=print)
    assert NodeWatch(tmp_path / "runs" / "m", 1, 1.0).read()["closed"]


def test_a_node_does_not_take_the_file_of_a_run_that_was_killed_for_node_0(tmp_path: Path) -> None:
    NodeFile(tmp_path, 0).update()  # which has no heartbeat
    with pytest.raises(ConfigurationError, match="node 0 has not reported here within 1 s; start the same command there"):
        follow(tmp_path, replace(NODES, rank=1, timeout_s=1.4), stop=lambda: False, on_line=print)


def test_a_node_that_waits_for_others_ends_at_the_first_signal(tmp_path: Path) -> None:
    """Also of a training, whose ranks a first signal only asks to stop."""
    with NodeFile(tmp_path, 0) as file, pytest.raises(typer.Exit) as ended:
        open_launcher("torchrun", NODES, file, lambda: True)
    assert ended.value.exit_code == 130
    assert not follow(tmp_path, replace(NODES, rank=1), stop=lambda: False, ask=lambda: True, on_line=print)


def test_a_node_fails_when_node_0_no_longer_reports(tmp_path: Path) -> None:
    """Its host loses power after this node has joined."""
    file = NodeFile(tmp_path, 0)
    lines: list[str] = []

    def beat() -> bool:
        if not lines:
            file.update()
        return False

    with pytest.raises(NodeLostError, match=r"node 0 \(.+\) stopped reporting; start all nodes again"):
        follow(tmp_path, replace(NODES, rank=1, timeout_s=0.5), stop=beat, on_line=lines.append)
    assert [line.partition(" (")[0] for line in lines] == ["node 1 joined node 0"]


def test_a_node_ends_when_node_0_is_started_again(tmp_path: Path) -> None:
    """It would take the launches of that run for those of its own."""
    ends_at = time.monotonic() + 60.0
    with NodeFile(tmp_path, 0), pytest.raises(NodeLostError, match=r"node 0 \(.+\) was started again; start this node again"):
        follow(
            tmp_path,
            replace(NODES, rank=1, timeout_s=60.0),  # a busy machine delays heartbeats
            stop=lambda: time.monotonic() > ends_at,
            on_line=lambda _: NodeFile(tmp_path, 0).update(),
        )


def announce(file: NodeFile, folder: Path, **fields: Any) -> None:
    launch = {"number": 1, "folder": str(folder), "id": "new", "ranks": 2, "variables": {}}
    file.update(launch={**launch, **fields})


def test_a_node_waits_for_the_files_of_a_launch_while_it_sees_those_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows them for up to a minute. A command that ends runs in place of torchrun."""
    monkeypatch.setattr(TorchrunLauncher, "command", lambda *_: ["true"])
    folder = tmp_path / "launch"
    before = job(folder, ranks=2)
    before.prepare()
    lines: list[str] = []
    joined_at: list[float] = []
    seen: list[str] = []

    def renewed() -> bool:
        if joined_at and time.monotonic() - joined_at[0] > 2.0 and not seen:
            seen.extend(lines)
            write_json(before.file, {"id": "new"})
        return bool(joined_at) and time.monotonic() - joined_at[0] > 60.0

    with NodeFile(tmp_path, 0) as file:
        announce(file, folder)

        def on_line(line: str) -> None:
            lines.append(line)
            if not joined_at:
                joined_at.append(time.monotonic())
            if line.startswith("launch"):
                file.update(ended=1)
                closing = threading.Timer(1.0, lambda: file.update(closed=True))
                closing.start()

        assert follow(tmp_path, replace(NODES, rank=1, timeout_s=20.0), stop=renewed, on_line=on_line)
    assert [line.partition(" (")[0] for line in seen] == ["node 1 joined node 0"]
    assert lines[1:] == [f"launch 1: {folder}"]


def test_a_node_that_never_sees_the_files_of_a_launch_says_so(tmp_path: Path) -> None:
    with NodeFile(tmp_path, 0) as file:
        announce(file, tmp_path / "launch")
        with pytest.raises(NodeLostError, match="the files of launch 1 are not visible on node 1 after 5 s"):
            follow(tmp_path, replace(NODES, rank=1, timeout_s=5.0), stop=lambda: False, on_line=print)


def test_a_node_has_the_whole_time_for_the_files_of_each_launch(tmp_path: Path) -> None:
    """The first launch ends before its files are visible; those of the second are not visible either."""
    second_at: list[float] = []
    with NodeFile(tmp_path, 0) as file:
        announce(file, tmp_path / "launch")

        def announce_second() -> None:
            file.update(ended=1)
            time.sleep(1.0)
            second_at.append(time.monotonic())
            announce(file, tmp_path / "launch", number=2)

        threading.Timer(4.5, announce_second).start()
        with pytest.raises(NodeLostError, match="the files of launch 2 are not visible on node 1"):
            follow(tmp_path, replace(NODES, rank=1, timeout_s=5.0), stop=lambda: False, on_line=print)
    assert time.monotonic() - second_at[0] > 5.0


def test_a_launch_that_has_ended_before_a_node_saw_it_is_reported_as_ended(tmp_path: Path) -> None:
    """Node 0 waits for that."""
    with NodeFile(tmp_path, 0) as file:
        announce(file, tmp_path / "launch")
        file.update(ended=1)
        threading.Timer(3.0, lambda: file.update(closed=True)).start()
        assert follow(tmp_path, replace(NODES, rank=1, timeout_s=20.0), stop=lambda: False, on_line=print)
    assert NodeWatch(tmp_path, 1, 1.0).read()["ended"] == 1
