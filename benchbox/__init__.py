"""benchbox: which set-up trains this policy fastest in the memory I have, and is it numerically what I think it is?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchbox.adapters import adapt as adapt
    from benchbox.api.commands import compare as compare
    from benchbox.api.commands import load as load
    from benchbox.api.commands import run as run
    from benchbox.api.results import Results as Results
    from benchbox.audit.subjects.live import PrecisionAudit as PrecisionAudit
    from benchbox.audit.subjects.live import audit_precision as audit_precision
    from benchbox.audit.subjects.live import observe as observe

__version__ = "0.1.0"

# Imported when they are first used: some need torch, and `import benchbox` stays light.
_PUBLIC = {
    "adapt": "benchbox.adapters",
    "audit_precision": "benchbox.audit.subjects.live",
    "compare": "benchbox.api.commands",
    "load": "benchbox.api.commands",
    "observe": "benchbox.audit.subjects.live",
    "PrecisionAudit": "benchbox.audit.subjects.live",
    "Results": "benchbox.api.results",
    "run": "benchbox.api.commands",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'benchbox' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
