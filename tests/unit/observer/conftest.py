from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _seeded_on_one_thread(one_thread: None) -> None:
    torch.manual_seed(0)


@pytest.fixture
def restored_hooks() -> Iterator[None]:
    """Restore the hooks of optimizers afterwards: an observer leaves idle ones where it is removed while they run, or where
    several threads step, and with them our optimizers step as torch's do.
    """
    registries = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(registry) for registry in registries]
    yield
    for registry, hooks in zip(registries, before, strict=True):
        registry.clear()
        registry.update(hooks)
