"""Checks of output paths before the work whose results are written there."""

from pathlib import Path

from benchbox.errors import ConfigurationError, Problem


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raise ConfigurationError if a folder cannot be created there because a file is in the way.

    Args:
        option: the option that names the folder.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigurationError(Problem(f"{option} {folder}", f"{existing} is a file", "name a folder: it gets several files"))


def check_file(file: Path) -> None:
    """Raise ConfigurationError if the file of `--out` cannot be written: it is a folder, or its folder is a file."""
    if file.is_dir():
        raise ConfigurationError(Problem(f"--out {file}", "is a folder", "name a file in it"))
    existing = next(path for path in file.parents if path.exists())
    if not existing.is_dir():
        raise ConfigurationError(Problem(f"--out {file}", f"{existing} is a file", "write elsewhere"))
