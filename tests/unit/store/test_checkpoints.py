"""The manifest of a checkpoint, and which checkpoint a training resumes from."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchbox.errors import ConfigurationError, DataError, RecordError
from benchbox.spec.optim import SpikeSpec
from benchbox.store import checkpoints
from benchbox.store.checkpoints import (
    begin_checkpoint,
    configuration_changes,
    damage_of,
    describe_resume,
    find_checkpoint,
    list_checkpoints,
    publish_checkpoint,
    remove_old_checkpoints,
    set_damaged_aside,
)
from benchbox.store.files import read_json, write_json
from tests.support.example_run import CELL
from tests.support.saved_checkpoints import save_checkpoint


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint from before cells could freeze."""
    checkpoint = save_checkpoint(tmp_path, 3)
    manifest = read_json(checkpoint / "checkpoint.json")
    del manifest["crc32"], manifest["cell"]["freeze"]
    write_json(checkpoint / "checkpoint.json", manifest)
    return checkpoint


def test_a_checkpoint_from_before_cells_could_freeze_continues_one_that_freezes_nothing(old: Path) -> None:
    assert configuration_changes(old, CELL) == []
    with pytest.raises(ConfigurationError, match="freeze is 'full' there and 'freeze_vision' here"):
        configuration_changes(old, replace(CELL, freeze="freeze_vision"))


def test_a_checkpoint_without_a_valid_manifest_is_named(old: Path) -> None:
    write_json(old / "checkpoint.json", {"schema_version": 2, "steps": 3})
    with pytest.raises(RecordError, match=r"checkpoint\.json: not what benchbox writes"):
        configuration_changes(old, CELL)


def test_what_is_wrong_with_a_manifest_is_not_answered_by_deleting_it(old: Path) -> None:
    """A folder without a manifest is no checkpoint any more, and the next command would not say that it had been one."""
    (old / "checkpoint.json").write_text("{")
    with pytest.raises(RecordError, match=r"checkpoint\.json: not whole JSON .*; restore it from a copy, or take another"):
        configuration_changes(old, CELL)


def test_a_checkpoint_of_an_older_format_is_refused_with_what_to_do(old: Path) -> None:
    write_json(old / "checkpoint.json", {"schema_version": 1, "steps": 3})
    with pytest.raises(DataError, match="a checkpoint of format 1, and this benchbox reads 2; start the training anew"):
        set_damaged_aside(old.parent)


def test_backend_and_split_may_change_while_the_samples_of_a_step_stay(tmp_path: Path) -> None:
    """The line says what changed, and where in the data the training continues."""
    cell = replace(CELL, backend="hsdp", shard_size=2, world_size=2, batch=2, accumulation=2)
    checkpoint = save_checkpoint(tmp_path, 3, cell)
    other = replace(cell, backend="fsdp2", shard_size=None, world_size=4, batch=1)
    expected = [
        "backend is 'hsdp' there and 'fsdp2' here",
        "batch is 2 there and 1 here",
        "shard_size is 2 there and None here",
        "world_size is 2 there and 4 here",
    ]
    assert sorted(configuration_changes(checkpoint, other)) == expected
    assert describe_resume(checkpoint, other) == f"resuming after step 3 (24 samples); changed: {', '.join(expected)}"
    assert describe_resume(checkpoint, cell) == "resuming after step 3 (24 samples)"
    with pytest.raises(ConfigurationError, match=r"world_size is 2 there and 4 here \(8 samples per step there and 16 here\)"):
        configuration_changes(checkpoint, replace(cell, world_size=4))
    with pytest.raises(ConfigurationError, match="seed is "):
        configuration_changes(checkpoint, replace(other, seed=cell.seed + 1))


def test_the_number_of_loader_processes_may_change(tmp_path: Path) -> None:
    """It changes no sample."""
    fewer = replace(CELL, data=replace(CELL.data, workers=0))
    changes = configuration_changes(save_checkpoint(tmp_path, 3), fewer)
    assert changes == [f"data.workers is {CELL.data.workers} there and 0 here"]


def test_a_guard_against_spikes_that_is_added_or_taken_out_is_another_configuration(tmp_path: Path) -> None:
    guarded = replace(CELL, optim=replace(CELL.optim, spike=SpikeSpec(action="skip")))
    with pytest.raises(ConfigurationError, match=r"another configuration: optim\.spike is None there and \{.*'skip'.*\} here"):
        configuration_changes(save_checkpoint(tmp_path / "a", 3), guarded)
    checkpoint = save_checkpoint(tmp_path / "b", 3, guarded)
    with pytest.raises(ConfigurationError, match=r"another configuration: optim\.spike is \{.*\} there and None here"):
        configuration_changes(checkpoint, CELL)
    assert configuration_changes(checkpoint, guarded) == []


@pytest.mark.parametrize("damage", ["cut off", "missing", "another bit", "no manifest"])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_previous_one_is_the_newest(tmp_path: Path, damage: str) -> None:
    good, bad = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 2)
    file = bad / ("checkpoint.json" if damage == "no manifest" else "tensors.bin")
    content = file.read_bytes()
    file.unlink()
    if damage == "cut off":
        file.write_bytes(content[:-1])
    if damage == "another bit":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert damage_of(bad) is not None
    (line,) = set_damaged_aside(tmp_path)
    assert f"{bad}: damaged checkpoint (" in line
    assert "renamed to damaged-step-00000002, and step-00000001 is used" in line
    assert list_checkpoints(tmp_path) == [good]
    assert (tmp_path / "latest").resolve() == good
    assert set_damaged_aside(tmp_path) == []


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ('"bytes": 4096', '"bytds": 4096'),
        ('"seed": 0', '"seed": 1'),
        ('"samples": 16', '"samples": 17'),
        ("version", "versioo"),
    ],
    ids=["entry of a file", "configuration", "samples", "schema version"],
)
def test_a_manifest_with_another_character_is_damaged_and_not_another_configuration(
    tmp_path: Path, saved: str, other: str
) -> None:
    """It is JSON still, which says nothing about its contents."""
    good, manifest = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 2) / "checkpoint.json"
    text = manifest.read_text()
    assert saved in text
    manifest.write_text(text.replace(saved, other, 1))
    (line,) = set_damaged_aside(tmp_path)
    assert f"{manifest}: has other contents than were saved" in line
    assert list_checkpoints(tmp_path) == [good]


def test_where_every_checkpoint_is_damaged_none_is_renamed_and_no_training_starts_over(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 1)
    (checkpoint / "tensors.bin").unlink()
    with pytest.raises(DataError, match=r"damaged checkpoint \(tensors.bin is missing\), and there is no intact one"):
        set_damaged_aside(tmp_path)
    assert list_checkpoints(tmp_path) == [checkpoint]


def test_scores_of_another_metric_are_not_compared_and_what_has_them_stays_until_there_are_others(tmp_path: Path) -> None:
    """The mode was wrong at first: the lowest score of the first checkpoints is that of the highest loss."""
    first = [save_checkpoint(tmp_path, steps, score=score, mode="max") for steps, score in ((2, -1.5), (4, -1.4))]
    second = [save_checkpoint(tmp_path, 6, score=1.9, mode="min")]
    remove_old_checkpoints(tmp_path, keep=1, best=2)
    assert list_checkpoints(tmp_path) == [*first, *second]
    second += [save_checkpoint(tmp_path, steps, score=score, mode="min") for steps, score in ((8, 1.2), (10, 2.5))]
    remove_old_checkpoints(tmp_path, keep=1, best=2)
    assert list_checkpoints(tmp_path) == second


@pytest.mark.parametrize(("setting", "values"), [("max_samples", (100, 200)), ("weights", ("live", "averages"))])
def test_scores_of_another_validation_are_not_compared(setting: str, values: tuple[Any, Any], tmp_path: Path) -> None:
    paths = [
        save_checkpoint(tmp_path, steps, score=score, mode="min", validation={setting: value})
        for steps, score, value in ((2, 0.1, values[0]), (4, 0.5, values[1]), (6, 0.6, values[1]))
    ]
    remove_old_checkpoints(tmp_path, keep=1, best=1)
    assert list_checkpoints(tmp_path) == paths[1:]


def test_while_a_checkpoint_is_replaced_the_link_to_the_newest_leads_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (save_checkpoint(tmp_path, steps) for steps in (2, 4))

    def is_killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_delete", is_killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 4)
    assert (tmp_path / "latest").resolve() == first


def test_scores_of_other_data_are_not_compared_and_what_has_them_stays_until_there_are_others(tmp_path: Path) -> None:
    """The loss of easier validation episodes says nothing about that of others."""
    first = save_checkpoint(tmp_path, 2, score=0.1, mode="min", episodes=100)
    second = [save_checkpoint(tmp_path, 4, score=0.5, mode="min", episodes=101)]
    remove_old_checkpoints(tmp_path, keep=1, best=2)
    assert list_checkpoints(tmp_path) == [first, *second]
    second += [save_checkpoint(tmp_path, steps, score=0.6, mode="min", episodes=101) for steps in (6, 8)]
    remove_old_checkpoints(tmp_path, keep=1, best=1)
    assert list_checkpoints(tmp_path) == [second[0], second[-1]]


def test_scores_of_a_checkpoint_from_before_data_were_stated_are_compared(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path, 2, score=0.1, mode="min")]
    paths += [save_checkpoint(tmp_path, steps, score=0.6, mode="min", episodes=100) for steps in (4, 6)]
    remove_old_checkpoints(tmp_path, keep=1, best=1)
    assert list_checkpoints(tmp_path) == [paths[0], paths[2]]


def test_a_checkpoint_whose_score_cannot_be_read_stays_and_ends_no_training(tmp_path: Path) -> None:
    paths = [
        save_checkpoint(tmp_path, steps, score=score, mode="min") for steps, score in ((2, 1.0), (4, 3.0), (6, 2.0), (8, 1.5))
    ]
    (paths[0] / "checkpoint.json").write_text("{")
    remove_old_checkpoints(tmp_path, keep=1, best=2)
    assert list_checkpoints(tmp_path) == [paths[0], *paths[2:]]


def test_no_checkpoint_is_without_its_files_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it removes one leaves nothing that looks like a checkpoint."""
    save_checkpoint(tmp_path, 1)
    save_checkpoint(tmp_path, 2)

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            next(path.glob("*.bin")).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("benchbox.store.checkpoints.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_old_checkpoints(tmp_path, keep=1)
    assert [damage_of(path) for path in list_checkpoints(tmp_path)] == [None]


def test_without_a_link_a_checkpoint_is_published_with_a_warning_and_the_newest_is_found(tmp_path: Path) -> None:
    """Some file systems have no links. Here a folder is in the place of the link that is made first."""
    (tmp_path / "checkpoints/.latest/file").mkdir(parents=True)
    warnings: list[str] = []
    for steps in (1, 2):
        partial = begin_checkpoint(tmp_path / "checkpoints", steps)
        write_json(partial / "checkpoint.json", {})
        newest = publish_checkpoint(tmp_path / "checkpoints", steps, warnings.append)
    assert [warning.partition(": ")[0] for warning in warnings] == [str(tmp_path / "checkpoints/latest")] * 2
    assert warnings[1].endswith("the newest checkpoint is step-00000002")
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == newest


def test_the_newest_checkpoint_is_found_where_the_link_has_become_a_folder(tmp_path: Path) -> None:
    """A copy of a training may follow links, and then go on: no later checkpoint replaces that folder."""
    save_checkpoint(tmp_path / "training/checkpoints", 1)
    folder = shutil.copytree(tmp_path / "training", tmp_path / "copy") / "checkpoints"
    assert not (folder / "latest").is_symlink()
    newest = save_checkpoint(folder, 2)
    assert find_checkpoint(tmp_path / "copy") == find_checkpoint(folder) == newest
    assert find_checkpoint(folder / "latest").name == "latest", "if it is named"
    (newest / "checkpoint.json").unlink()
    assert find_checkpoint(folder).name == "step-00000001", "the newest complete one"


def test_a_link_to_an_older_checkpoint_does_not_hide_the_newest(tmp_path: Path) -> None:
    """A process was killed before it replaced the link."""
    for steps in (1, 2):
        newest = save_checkpoint(tmp_path, steps)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000001")
    assert find_checkpoint(tmp_path) == newest


def test_a_checkpoint_under_another_name_is_found(tmp_path: Path) -> None:
    """Exported by a copy of `latest` alone, or renamed."""
    checkpoint = save_checkpoint(tmp_path / "training", 1)
    for name in ("alone/latest", "alone/checkpoints/latest", "collapse"):
        copy = shutil.copytree(checkpoint, tmp_path / name)
        given = tmp_path / name.partition("/")[0]
        assert find_checkpoint(given) == copy
        shutil.rmtree(given)


def keep_folders(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let no folder of this name be removed: what NFS does while another process has one of its files open."""
    remove = os.rmdir

    def fail(path: str | Path, **options: Any) -> None:
        if Path(path).name == name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", fail)


def test_old_checkpoints_that_cannot_be_removed_are_warnings_and_the_next_save_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (1, 2):
        save_checkpoint(tmp_path, steps)
    warnings: list[str] = []
    keep_folders(monkeypatch, ".removed-step-00000001")
    remove_old_checkpoints(tmp_path, keep=1, warn=warnings.append)
    removed = tmp_path / ".removed-step-00000001"
    assert warnings == [
        f"{removed}: not all files of an old checkpoint could be removed (Directory not empty); the next save tries again"
    ]
    newest = save_checkpoint(tmp_path, 3)
    assert removed.exists()
    assert list_checkpoints(tmp_path)[-1] == newest


def test_a_save_does_not_begin_in_a_folder_of_its_own_that_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".partial-step-00000003").mkdir()
    keep_folders(monkeypatch, ".partial-step-00000003")
    with pytest.raises(OSError, match="Directory not empty"):
        begin_checkpoint(tmp_path, 3)


def test_all_files_of_a_checkpoint_are_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, synced = os.fsync, []

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    partial = tmp_path / ".partial-step-00000001"
    tensors = partial / "averages" / "tensors.bin"
    tensors.parent.mkdir(parents=True)
    tensors.touch()
    publish_checkpoint(tmp_path, 1)
    assert synced == [tensors.parent, tensors, partial, tmp_path, tmp_path]


def test_recomputation_compilation_and_padding_may_change_in_a_resumed_training(tmp_path: Path) -> None:
    other = replace(CELL, checkpointing=True, compile="blocks", padding="longest")
    assert configuration_changes(save_checkpoint(tmp_path, 3), other) == [
        "checkpointing is False there and True here",
        "compile is 'off' there and 'blocks' here",
        "padding is 'full' there and 'longest' here",
    ]
