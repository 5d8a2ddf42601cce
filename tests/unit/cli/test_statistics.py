"""Preparation of the data before ranks start: what is said of it, and what is refused."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from benchbox.cli.statistics import prepare_statistics
from benchbox.data import open_dataset
from benchbox.data.samples.mixture import select_datasets
from benchbox.errors import DataError
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_dataset

if TYPE_CHECKING:
    from pathlib import Path


def test_episodes_are_divided_by_the_seeds_of_the_cells(tmp_path: Path) -> None:
    """A seed may hold out all episodes of the smaller of two entries of a dataset, and another seed not."""
    root = write_dataset(tmp_path / "data", lengths=(6,) * 10, tasks=("lift",) * 10)
    keep = tmp_path / "keep.json"
    keep.write_text(json.dumps({"0": [[0, 6]], "1": [[0, 6]]}))
    datasets = (DatasetSpec(path=str(root)), DatasetSpec(path=str(root), keep=str(keep)))
    data = DataSpec(kind="lerobot", datasets=datasets, validation=0.4)
    refused, printed = {}, {}
    for seed in range(20):
        console = Console(file=io.StringIO(), width=200)
        try:
            prepare_statistics(data, [seed], console)
        except DataError as error:
            refused[seed] = str(error)
        else:
            printed[seed] = console.file.getvalue()
    assert refused, "of some seed"
    assert printed
    for seed in refused:
        with pytest.raises(DataError, match="all episodes that it draws from are validated"):
            select_datasets([(open_dataset(root), entry) for entry in datasets], validation=0.4, seed=seed)
    good, bad = next(iter(printed)), next(iter(refused))
    with pytest.raises(DataError, match="all episodes that it draws from are validated"):
        prepare_statistics(data, [good, bad], Console(file=io.StringIO()))
    members = select_datasets([(open_dataset(root), entry) for entry in datasets], validation=0.4, seed=good)
    assert f"{members[0].selection.validation_episodes} of 10 episodes for validation" in printed[good]


def test_the_name_of_a_dataset_is_printed_literally(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "a:key:b", lengths=(6, 6), tasks=("lift", "lift"))
    console = Console(file=io.StringIO(), width=200)
    datasets = (DatasetSpec(path=str(root)),)
    prepare_statistics(DataSpec(kind="lerobot", datasets=datasets), [0], console)
    assert "a:key:b" in console.file.getvalue()
