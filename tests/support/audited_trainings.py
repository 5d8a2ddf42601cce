"""Trainings whose facts are judged, with a check that the observer changes nothing in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from benchbox.audit.judge import Judgement
    from benchbox.observer.facts import RankFacts

STEPS = 8


def observe(training: Callable[[], nn.Module]) -> RankFacts:
    """Return the facts of a training, after a check that its weights and random state are those of the unobserved one."""
    torch.manual_seed(0)
    unobserved, random_state = training(), torch.get_rng_state()
    torch.manual_seed(0)
    with StepObserver(source="command", steps=STEPS) as observer:
        observed = training()
    pairs = zip(unobserved.parameters(), observed.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the observer changes the training"
    assert torch.equal(random_state, torch.get_rng_state())
    assert observer.facts().problems == ()
    return observer.facts()


def loss_of(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 8, dtype=dtype)).float().square().mean()


def failing(judgement: Judgement) -> list[str]:
    return [finding.code for finding in judgement.findings if finding.severity in ("error", "warning")]
