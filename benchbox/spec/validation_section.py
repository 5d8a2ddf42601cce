"""Section `validation` of a training file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchbox.spec.types import ABSENT, Count, Strict


class ValidationSection(Strict):
    """Validation: how often the loss of the episodes that are not trained on is computed, and over how many of their frames."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations, of which one is after the last step; 0 for none. `data.validation` chooses the episodes."""
    at_start: bool = False
    """Whether to validate before the first step too."""
    batch: Count | None = ABSENT
    """Largest number of samples per rank in a batch of validation; that of the training when it is absent."""
    weights: Literal["trained", "averages"] = "trained"
    """Whose loss it is: of the weights, or of their averages, which `optim.ema_decay` keeps."""
    max_samples: Annotated[int, Field(ge=1)] | None = ABSENT
    """Largest number of samples of a validation, at equal distances in the validation frames; all of them when it is absent."""
