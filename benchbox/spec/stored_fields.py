"""Fields of a cell as they are read from records, plans, baselines and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping


def known_fields(declared: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values, which are fields of a dataclass.

    Raises:
        RecordError: one is not a field of it: it may change what was measured, and is not left out.
    """
    if unknown := sorted(values.keys() - declared.__dataclass_fields__.keys()):
        message = f"a cell has the field {unknown[0]!r}, which this benchbox does not know"
        raise RecordError(f"{message}: written by a newer benchbox; upgrade this one")
    return values
