"""Files that a command line names by path or, where they come with benchbox, by their name alone."""

from __future__ import annotations

from pathlib import Path

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.bundled import bundled_folders
from benchbox.registry.names import did_you_mean
from benchbox.spec.source import yaml_files

MATRICES = "matrices"
TRAINING_FILES = "matrices/train"


def find_file(path: Path, folder: str, *more_folders: str) -> Path:
    """Return the path itself if it is a file, else the file of that name in ./`folder` or in the bundled one.

    Names that are not in `folder` are looked for in `more_folders`.

    `fsdp_vs_zero2` thus names `matrices/fsdp_vs_zero2.yaml` in any working directory. A path that is not the name of such a
    file is returned as it is, for the reader of the file to refuse.

    Raises:
        ConfigurationError: there is no such file, nor one of that name.
    """
    if path.is_file():
        return path
    files: dict[str, Path] = {}
    for searched in (folder, *more_folders):
        files = {**_named_files(searched), **files}
    is_name = len(path.parts) == 1 and not path.suffix
    if is_name and path.name in files:
        return files[path.name]
    if path.exists():
        return path
    if is_name:
        candidates = [*files, *(file.name for file in yaml_files(Path()))]
        problem = Problem(str(path), f"no such file, and none of that name in {folder}", did_you_mean(path.name, candidates))
        raise ConfigurationError(problem)
    if path.stem in files:
        raise ConfigurationError(Problem(str(path), "no such file", f"did you mean {path.stem!r}, which needs no path?"))
    return path


def _named_files(folder: str) -> dict[str, Path]:
    """Return the files by name. Those of the working directory come before the bundled ones."""
    files: dict[str, Path] = {}
    for root in (Path(folder), *bundled_folders(folder)):
        for file in sorted(root.glob("*.yaml")):
            files.setdefault(file.stem, file)
    return files
