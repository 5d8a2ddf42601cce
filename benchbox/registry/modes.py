"""Modes in which a policy can be trained: what is given, and what is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.contracts import Mode
from benchbox.registry.declarations import declared_texts

if TYPE_CHECKING:
    from benchbox.registry.policies import PolicyEntry

DECLARATION = "MODES"
POLICY = "policy"


def policy_modes(entry: PolicyEntry) -> tuple[str, ...]:
    """Return the modes of a policy: those in `MODES = ("policy", "joint")` of its `policy.py`, without it only `policy`.

    Raises:
        ConfigurationError: the declaration names something else.
    """
    path = entry.folder / "policy.py"
    declared = declared_texts(path.read_bytes(), DECLARATION)
    if declared is None:
        return (POLICY,)
    modes, line = declared
    if not modes or not set(modes) <= set(get_args(Mode)):
        raise ConfigurationError(Problem(f"{path}:{line}:1", f"{DECLARATION} is a tuple of {', '.join(get_args(Mode))}"))
    return modes


def mode_refusal(entry: PolicyEntry, mode: str) -> tuple[str, str] | None:
    """Return why a policy cannot be trained in this mode, and what to do; None if it can."""
    modes = policy_modes(entry)
    if mode in modes:
        return None
    if modes == (POLICY,):
        return f"policy {entry.name} has no modes, and data asks for {mode}", f"write mode: {POLICY}, or leave it out"
    return f"policy {entry.name} has no mode {mode!r}", f"one of {', '.join(modes)}"
