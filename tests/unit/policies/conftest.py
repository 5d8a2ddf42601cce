"""Set-up of every test of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.support import policy_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from benchbox.registry.contracts import Batch, Policy

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Fix the order of summation, on which equality of losses relies, for all shapes."""


@pytest.fixture(scope="session")
def awake() -> Callable[..., tuple[Policy, Batch]]:
    """Return `awake` that trains each policy once, and gives every test a policy of its own with the trained weights.

    No axis changes the shape of a parameter, so that one training serves them all.
    """
    trained: dict[str, dict[str, torch.Tensor]] = {}

    def awake(name: str = "pi05", **axes: object) -> tuple[Policy, Batch]:
        if name not in trained:
            trained[name] = policy_batches.awake(name)[0].state_dict()
        policy = policy_batches.build(name, **axes)
        policy.load_state_dict(trained[name])
        return policy, policy_batches.make_batch(policy.batch_spec(), 4)

    return awake
