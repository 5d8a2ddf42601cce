"""Scripts that no package contains, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def load_script(path: Path) -> ModuleType:
    """Execute a script as a module named after its folder and file, and return it. Its `__main__` part does not run."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # data classes look their module up
    spec.loader.exec_module(module)
    return module
