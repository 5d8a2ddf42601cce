"""Which sources of a policy a launch measured: a record speaks only for those."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from benchbox.registry.policies import policy_entry, search_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def policy_sha256(name: str, policy_dirs: Sequence[Path] = ()) -> str:
    """SHA-256 over the files of a policy's folder and of the shared folders (`_layers`, ...) it may import.

    Raises:
        ConfigurationError: no such policy.
    """
    folders = [policy_entry(name, policy_dirs).folder, *_shared(policy_dirs)]
    digest = hashlib.sha256()
    for folder in folders:
        for path in _sources(folder):
            content = path.read_bytes()
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _shared(policy_dirs: Sequence[Path]) -> list[Path]:
    """Shared building blocks by name: what python would import, the first on the search path."""
    found: dict[str, Path] = {}
    for root in search_path(policy_dirs):
        for folder in root.iterdir():
            if folder.is_dir() and folder.name.startswith("_") and folder.name != "__pycache__":
                found.setdefault(folder.name, folder)
    return [found[name] for name in sorted(found)]


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
