"""The optimizer of the recipe `acme_sgd`."""

from __future__ import annotations

from typing import Any

import torch


def sgd(groups: list[dict[str, Any]], *, lr: float, weight_decay: float, **_: Any) -> torch.optim.Optimizer:
    """Build SGD with momentum; the betas and eps of Adam do not concern it."""
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=weight_decay)
