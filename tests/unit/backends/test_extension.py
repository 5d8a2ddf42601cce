"""When the compilation of DeepSpeed's CPU extension is reported as a stage of its own."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace

import deepspeed.accelerator
import pytest

from benchbox.backends.extension import NAME, build_extension, extension_file


class Builder:
    """Builder that writes the file that DeepSpeed's own compiles."""

    name = NAME

    def __init__(self, root: Path) -> None:
        self.root = root
        self.loads = 0

    def load(self, *, verbose: bool) -> None:
        self.loads += 1
        extension_file(self.root).touch()


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder(tmp_path)
    accelerator = SimpleNamespace(create_op_builder=lambda name: builder if name == "ShareMemCommBuilder" else None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    return builder


def test_compiling_is_a_stage_and_loading_what_is_compiled_is_not(builder: Builder) -> None:
    stages: list[str] = []
    build_extension(stages.append)
    assert stages == ["compile_extension", "prepare"]
    build_extension(stages.append)
    assert stages == ["compile_extension", "prepare"]
    assert builder.loads == 2


def test_the_file_is_named_as_deepspeed_names_it() -> None:
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    assert ShareMemCommBuilder.NAME == NAME


def test_a_lock_that_a_killed_build_left_is_removed_while_no_other_rank_can_build(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for ever for such a file. Ranks go one after another: none removes the lock of a build that runs."""
    stale = extension_file(builder.root).parent / "lock"
    stale.parent.mkdir()
    stale.touch()
    steps: list[str] = []
    unlink = Path.unlink

    def note(step: str) -> None:
        with (builder.root / f"{NAME}.building").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        steps.append(step)

    def remove(path: Path, *, missing_ok: bool) -> None:
        note("remove")
        unlink(path, missing_ok=missing_ok)

    def load(*, verbose: bool) -> None:
        note("load")
        assert not stale.exists()

    monkeypatch.setattr(Path, "unlink", remove)
    monkeypatch.setattr(builder, "load", load)
    build_extension()
    assert steps == ["remove", "load"]
