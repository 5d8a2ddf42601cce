"""Matrices and training files named without a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry import bundled
from benchbox.spec import load_matrix
from benchbox.spec.train import load_train

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = "name: trial\npolicy: alpha\nsize: tiny\nworld_size: 2\nbackend: ddp\nbatch: 1\n"
TRAINING = MATRIX + "steps: 3\n"


@pytest.fixture
def wheel(tmp_path: Path, policies: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two bundled files, and an empty working directory."""
    package = tmp_path / "site-packages" / "benchbox"
    matrices = package / "_bundled" / "matrices"
    (matrices / "train").mkdir(parents=True)
    (matrices / "trial.yaml").write_text(MATRIX)
    (matrices / "train" / "pretraining.yaml").write_text(TRAINING)
    policies.rename(package / "_bundled" / "policies")
    monkeypatch.setattr(bundled, "_PACKAGE", package)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return package


def test_a_bundled_matrix_is_found_by_its_name_in_an_empty_folder(wheel: Path) -> None:
    assert load_matrix("trial").path == wheel / "_bundled" / "matrices" / "trial.yaml"


def test_a_bundled_training_file_is_found_by_its_name_in_an_empty_folder(wheel: Path) -> None:
    assert load_train("pretraining").steps == 3


def test_a_matrix_of_the_working_directory_comes_before_a_bundled_one(wheel: Path, tmp_path: Path) -> None:
    local = tmp_path / "empty" / "matrices" / "trial.yaml"
    local.parent.mkdir()
    local.write_text(MATRIX)
    assert load_matrix("trial").path.resolve() == local


def test_a_folder_of_the_same_name_does_not_hide_a_matrix(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "trial").mkdir()
    assert load_matrix("trial").path.is_file()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("trail", "trail: no such file, and none of that name in matrices; did you mean 'trial'?"),
        ("other", "other: no such file, and none of that name in matrices; one of mine.yaml, pretraining, trial"),
        ("mine", "mine: no such file, and none of that name in matrices; did you mean 'mine.yaml'?"),
        ("matrices/trial.yaml", "matrices/trial.yaml: no such file; did you mean 'trial', which needs no path?"),
        ("matrices/other.yaml", "matrices/other.yaml: no such file"),
    ],
)
def test_an_unknown_name_is_one_line_with_a_suggestion(wheel: Path, tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / "empty" / "mine.yaml").write_text(MATRIX)
    (tmp_path / "empty" / ".other.yaml").touch()  # of a tool
    with pytest.raises(ConfigurationError) as caught:
        load_matrix(path)
    assert str(caught.value) == line
