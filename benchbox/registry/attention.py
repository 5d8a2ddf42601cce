"""Attention kernels that a policy can switch to, read from its source: planning imports no policy."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.contracts import AttentionKernel
from benchbox.registry.declarations import declared_texts, parse_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.registry.policies import PolicyEntry

DECLARATION = "ATTENTION"
NATIVE = "native"
_SWITCHED = ("eager", "sdpa", "flex")

# Kernels that policies run in place of the requested one where it does not exist: `sdpa` has no scores with a soft cap, and
# `flex` is for masks.
_FALLBACKS = {"eager": frozenset[str](), "sdpa": frozenset({"eager"}), "flex": frozenset({"sdpa", "eager"})}


def attention_kernels(entry: PolicyEntry) -> tuple[str, ...]:
    """Return the values of `attention` that a policy supports.

    They are those in `ATTENTION = ("eager", "sdpa")` of its `policy.py`. Without it a policy switches to every kernel, unless
    it is made by `benchbox.adapt`: a module of others runs the kernels that it runs, which is `native`.

    Raises:
        ConfigurationError: the declaration names something else.
    """
    path = entry.folder / "policy.py"
    kernels, line = _read_kernels(path.read_bytes())
    kernel_names = get_args(AttentionKernel)
    if not kernels or not set(kernels) <= set(kernel_names):
        raise ConfigurationError(Problem(f"{path}:{line}:1", f"{DECLARATION} is a tuple of {', '.join(kernel_names)}"))
    return kernels


def default_attention(entry: PolicyEntry) -> str:
    """Return the kernel of a cell that names none: `sdpa` where the policy has it, else the first that it supports."""
    kernels = attention_kernels(entry)
    return "sdpa" if "sdpa" in kernels else kernels[0]


def attention_refusal(entry: PolicyEntry, kernel: str) -> tuple[str, str] | None:
    """Return why a policy cannot run with this kernel, and what to do; None if it can."""
    kernels = attention_kernels(entry)
    if kernel in kernels:
        return None
    if kernels == (NATIVE,):
        return f"policy {entry.name} cannot switch its attention to {kernel}", f"write attention: {NATIVE}, or leave it out"
    return f"policy {entry.name} has no attention {kernel!r}", f"one of {', '.join(kernels)}"


def attention_mismatch(requested: str, kernels: Iterable[str], sites: Mapping[str, Iterable[str]]) -> str | None:
    """Return how the kernels that ran contradict the requested one, or None when they do not.

    Another kernel than the requested one may run only as its fallback, and only for a whole call site.

    Args:
        kernels: names of the kernels that ran, such as `sdpa:flash_cpu`.
        sites: the same names by call site.
    """
    names = tuple(kernels)
    if requested == NATIVE:
        return None
    if requested not in _families(names) or _families(names) - {requested} - _FALLBACKS[requested]:
        return f"requested {requested} attention, observed {'+'.join(names)}"
    for site, called in sites.items():
        names = tuple(called)
        if requested in _families(names) and len(_families(names)) > 1:
            return f"requested {requested} attention, observed {'+'.join(names)} in {site}"
    return None


def _families(kernels: Iterable[str]) -> set[str]:
    return {kernel.split(":")[0] for kernel in kernels}


@lru_cache(maxsize=512)
def _read_kernels(source: bytes) -> tuple[tuple[str, ...], int]:
    """Return the kernels and the line of their declaration, 1 without one; no kernels if it is not a tuple of texts."""
    tree = parse_policy(source)
    if tree is None:
        return _SWITCHED, 1
    declared = declared_texts(source, DECLARATION)
    if declared is not None:
        return declared
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    adapts = any("adapt" in (getattr(function, "id", ""), getattr(function, "attr", "")) for function in calls)
    return ((NATIVE,) if adapts else _SWITCHED), 1
