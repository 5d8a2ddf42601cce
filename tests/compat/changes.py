"""Detection of dependencies that have changed since the lowest versions were last tested.

The file `tested.json` is committed with a change of dependencies. It states what was tested, and the digest of the files that
decide what can be installed.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.environments import ENVIRONMENTS, EXTRAS, ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.compat.parts import Result

TESTED = Path(__file__).parent / "tested.json"


def dependencies_digest(root: Path = ROOT) -> str:
    """Return a digest of the dependencies in pyproject.toml, the pins that development uses, and the lowest versions.

    constraints.txt is included because code that is adapted to a newer pin is what breaks with an older version. Of the extras
    those are included that the environments install.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = {extra: project["optional-dependencies"][extra] for extra in EXTRAS}
    declared = {key: project[key] for key in ("requires-python", "dependencies")} | extras
    lowest = root / ENVIRONMENTS[0].requirements.relative_to(ROOT)
    pins = "".join(path.read_text() for path in (root / "constraints.txt", lowest))
    return hashlib.sha256((json.dumps(declared, sort_keys=True) + pins).encode()).hexdigest()


def changed_since_tested() -> bool:
    """Return whether the lowest versions have to be tested again."""
    return not TESTED.exists() or json.loads(TESTED.read_text())["digest"] != dependencies_digest()


def write_tested(versions: Mapping[str, str], results: Mapping[str, Result]) -> None:
    """State that all parts passed with these versions.

    Raises:
        ValueError: a part did not.
    """
    if failed := [part for part, result in results.items() if not result.passed]:
        raise ValueError(f"did not pass: {', '.join(failed)}")
    summaries = {part: result.summary for part, result in results.items()}
    content = {"digest": dependencies_digest(), "versions": dict(versions), "results": summaries}
    TESTED.write_text(json.dumps(content, indent=1) + "\n")
