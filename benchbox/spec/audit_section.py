"""The section `audit` of a training file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from benchbox.spec.types import Strict, refusal

_OBSERVED_STEPS = 3


def _check_interval(every: int) -> int:
    if 0 < every < _OBSERVED_STEPS:
        raise refusal(f"audit.every is {every}, and an audit observes {_OBSERVED_STEPS} steps", "every: 3 or more, 0 for none")
    return every


class AuditSection(Strict):
    """Audits of the precision of a training while it runs."""

    every: Annotated[int, Field(ge=0), AfterValidator(_check_interval)] = 0
    """Steps between audits, each of which observes the last three of them; 0 for none."""
    stop_on: Literal["error", "warning", "never"] = "error"
    """The findings that end the training, with exit code 4: errors, warnings too, or none."""
