"""`native.c` is compiled where it can be, and steps are the same where it cannot."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.optim import native
from benchbox.optim.native import library
from tests.support.native_pairs import assert_same, needs_compiler, pair, step_both

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Folder of an empty compilation cache, in a process that has not loaded the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


@pytest.mark.usefixtures("native_at_any_size", "fresh")
def test_without_a_compiler_steps_are_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(native.VECTOR_FLAGS, torch.backends.cpu.get_cpu_capability(), ())
    monkeypatch.setenv("PATH", "")
    optimizers = pair()
    with caplog.at_level(logging.INFO):
        for step in range(2):
            step_both(*optimizers, step, 1.0)
    assert_same(*optimizers)
    assert [record.message for record in caplog.records] == [
        "optimizer steps on CPUs use torch's slower kernels: there is no C compiler (cc, gcc, clang)"
    ]


def compiler(folder: Path, script: str) -> Path:
    path = folder / "tools" / "cc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_a_compiler_that_fails_is_named_once_and_steps_are_the_same(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = compiler(fresh, "echo 'cc: internal error' >&2; exit 1")
    monkeypatch.setenv("PATH", str(broken.parent))
    optimizers = pair()
    for step in range(3):
        step_both(*optimizers, step, 1.0)
    assert_same(*optimizers)
    (message,) = [record.message for record in caplog.records]
    assert f"native.c could not be built with {broken}: cc: internal error; install a working compiler" in message
    assert not list(fresh.rglob("*.so")), "nothing half made is left"


@needs_compiler
def test_a_shared_object_that_others_could_have_written_is_not_loaded(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library() is not None
    (made,) = fresh.rglob("*.so")
    made.chmod(0o666)
    library.cache_clear()
    assert library() is None
    assert f"{made} can be written by others" in caplog.text


@needs_compiler
def test_users_whose_files_are_their_groups_get_it_too(fresh: Path) -> None:
    """On many systems what a program writes is writable by the user's group, unless it says otherwise."""
    before = os.umask(0o002)
    try:
        assert library() is not None
    finally:
        os.umask(before)
    (made,) = fresh.rglob("*.so")
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_another_version_of_the_compiler_builds_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = next(filter(None, map(shutil.which, native.COMPILERS)))
    for version in ("1", "1", "2"):
        path = compiler(fresh, f'[ "$1" = --version ] && echo {version} || exec {real} "$@"')
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
        library.cache_clear()
        assert library() is not None
    assert len(list(fresh.rglob("*.so"))) == 2


def test_a_user_without_a_home_steps_as_before(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    """A container may run with a user id that no user has."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert library() is None


@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_the_group_can_write_to(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library() is not None
    (made,) = fresh.rglob("*.so")
    made.parent.chmod(0o770)
    library.cache_clear()
    assert library() is None
    assert f"{made.parent} can be written by others" in caplog.text
