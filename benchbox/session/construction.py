"""Construction of the policy of a cell: on the meta device, or directly where its code reads values."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchbox.backends.deferred import META, TRANSFORMERS, DeferredWeights
from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.policies import build_policy
from benchbox.session.hidden import hidden_meta_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.registry.contracts import Axes, Policy
    from benchbox.spec.cell import Cell

DEFERRED = "on the meta device; weights were computed while the backend sharded them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Construction of a policy, as a record describes it: `how`, and the trainable parameters that no loss depends on.

    `unused_reason` says why the latter are unknown. Both are None for a policy whose author answers for them.
    """

    how: str
    unused: tuple[str, ...] | None = None
    unused_reason: str | None = None


_CONSTRUCTIONS: WeakKeyDictionary[nn.Module, Construction] = WeakKeyDictionary()


def construct_policy(cell: Cell, axes: Axes, device: torch.device, policy_dirs: Sequence[Path]) -> Policy:
    """Build a policy on the meta device, with a record of how its weights are computed, else directly on the device.

    Code that was not written for the meta device may read values or create tensors elsewhere. Such a policy is built as its
    code says, from the same seed on every rank, and then takes the memory of all its weights on every rank.

    Raises:
        ConfigurationError: there is no such policy or size.
        UnsupportedError: the policy does not support the axes.
    """
    build = _seeded(lambda: build_policy(cell.policy, cell.size, axes, policy_dirs), cell.seed)
    try:
        policy, how = _construct_on_meta(build, DeferredWeights(cell.seed, device)), DEFERRED
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001 (code of others may raise anything; if it is wrong, it raises again)
        with device:
            policy = build()
        reason = str(error).strip().partition("\n")[0]
        how = f"on the {device.type}, because it cannot be built on the meta device: {type(error).__name__}: {reason}"
    assert isinstance(policy, nn.Module)
    unused, unused_reason = None, None
    if hasattr(policy, "freeze_unused_parameters"):
        adapted: Any = policy
        unused_reason = adapted.freeze_unused_parameters()
        unused = adapted.unused_parameters if unused_reason is None else None
    _CONSTRUCTIONS[policy] = Construction(how=how, unused=unused, unused_reason=unused_reason)
    return policy


def construction_of(policy: Policy) -> Construction:
    """Return how a policy from `construct_policy` was built."""
    assert isinstance(policy, nn.Module)
    return _CONSTRUCTIONS[policy]


def _construct_on_meta(build: Callable[[], Policy], weights: DeferredWeights) -> Policy:
    was_imported = TRANSFORMERS in sys.modules
    with weights.recording(), META:
        policy = build()
    if (
        not was_imported and TRANSFORMERS in sys.modules
    ):  # imported too late for `recording` to let its models compute their weights
        return _construct_on_meta(build, weights.renewed())
    assert isinstance(policy, nn.Module)
    if (name := hidden_meta_tensor(policy)) is not None:
        raise UnsupportedError(f"{name} is a tensor outside parameters and buffers")
    weights.bind(policy)
    return policy


def seed_rank(seed: int) -> None:
    """Seed all generators for the steps of this rank, after the weights, which every rank computes from one seed."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _seed_generators(int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]))


def _seeded(build: Callable[[], Policy], seed: int) -> Callable[[], Policy]:
    """Return a function that builds from this seed: constructors of others may draw from any of the three generators."""

    def build_from_seed() -> Policy:
        _seed_generators(seed)
        return build()

    return build_from_seed


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
