from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.spec import Matrix, load_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    """Two policies, of which only one has a size `full`."""
    root = tmp_path / "policies"
    for name, sizes in {"alpha": ("tiny", "full"), "beta": ("tiny",)}.items():
        (root / name).mkdir(parents=True)
        (root / name / "policy.py").touch()
        (root / name / "presets.yaml").write_text("".join(f"{size}: {{}}\n" for size in sizes))
    return root


@pytest.fixture
def load(tmp_path: Path, policies: Path) -> Callable[..., Matrix]:
    """Load a matrix from its text."""

    def load(text: str | bytes, overrides: Mapping[str, str] | None = None) -> Matrix:
        path = tmp_path / "m.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_matrix(path, overrides, [policies])

    return load


@pytest.fixture
def refused(load: Callable[..., Matrix], tmp_path: Path) -> Callable[..., list[str]]:
    """Load a matrix that must be refused; the lines of the error, without the folder."""

    def refused(text: str | bytes, overrides: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigurationError) as caught:
            load(text, overrides)
        assert caught.value.exit_code == 2
        return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return refused
