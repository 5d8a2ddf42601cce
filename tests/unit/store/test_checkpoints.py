"""The description inside a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.errors import ConfigurationError, RecordError
from benchbox.store.checkpoints import check_same_configuration, write_description
from benchbox.store.files import read_json, write_json
from tests.support.example_run import CELL


@pytest.fixture
def old(tmp_path):
    """A checkpoint from before cells could freeze."""
    write_description(tmp_path, CELL, 3)
    description = read_json(tmp_path / "checkpoint.json")
    del description["cell"]["freeze"]
    write_json(tmp_path / "checkpoint.json", description)
    return tmp_path


def test_a_checkpoint_from_before_cells_could_freeze_continues_one_that_freezes_nothing(old):
    check_same_configuration(old, CELL)
    with pytest.raises(ConfigurationError, match="freeze is 'full' there and 'freeze_vision' here"):
        check_same_configuration(old, replace(CELL, freeze="freeze_vision"))


def test_a_checkpoint_without_a_valid_description_is_named(old):
    write_json(old / "checkpoint.json", {"steps": 3})
    with pytest.raises(RecordError, match=r"checkpoint\.json: not what benchbox writes"):
        check_same_configuration(old, CELL)
