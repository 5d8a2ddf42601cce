"""benchbox: which set-up trains this policy fastest in the memory I have, and is it numerically what I think it is?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchbox.adapters import adapt as adapt

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `benchbox.adapt` when it is first used: it needs torch."""
    if name == "adapt":
        return import_module("benchbox.adapters").adapt
    raise AttributeError(f"module 'benchbox' has no attribute {name!r}")
