"""Imports of a process that reads a dataset."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.datasets import LENGTHS, annotate

if TYPE_CHECKING:
    from pathlib import Path

READ = """
import sys
from benchbox.data import open_dataset
dataset = open_dataset(sys.argv[1])
print(dataset[0]["task"], dataset.text("response", 0), sep=": ")
print("pandas" in sys.modules)
"""


def test_reading_frames_and_texts_imports_no_pandas(dataset_root: Path, tmp_path: Path) -> None:
    """It takes 0.3 s, in every rank of every launch that reads a dataset."""
    root = annotate(dataset_root, tmp_path / "annotated", {"response": ["reach"] * sum(LENGTHS)})
    done = subprocess.run([sys.executable, "-c", READ, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["push the red block: reach", "False"]
