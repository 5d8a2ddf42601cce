"""Reasons for which a cell cannot run: fields that exclude one another, whatever the backend, or what its backend cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from benchbox.registry.backends import SetUp, backend_info

if TYPE_CHECKING:
    from benchbox.registry.contracts import AttentionKernel, PaddingMode

_RECOMPUTED_INSIDE = "a policy that is compiled as a whole recomputes inside its graph, unseen: write compile: blocks"
_COMPILED_BY_LENGTH = "FlexAttention is compiled for every length of a batch, unseen: write padding: full, or attention: sdpa"


class CellFields(SetUp, Protocol):
    """Fields of a cell for which it may be refused."""

    @property
    def backend(self) -> str: ...
    @property
    def attention(self) -> AttentionKernel: ...
    @property
    def padding(self) -> PaddingMode: ...


def fields_refusal(cell: CellFields) -> tuple[str, str] | None:
    """Return a field that another one excludes with every backend, and the reason; None if there is none."""
    if cell.compile == "model" and cell.checkpointing:
        return "compile", _RECOMPUTED_INSIDE
    if cell.padding == "longest" and cell.attention == "flex":
        return "padding", _COMPILED_BY_LENGTH
    return None


def cell_refusal(cell: CellFields) -> str | None:
    """Return why a cell cannot run, or None when it can."""
    refusal = backend_info(cell.backend).refusal(cell)
    if refusal is None and (excluded := fields_refusal(cell)):
        _, refusal = excluded
    return refusal
