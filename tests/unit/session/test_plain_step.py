"""A step of a session is the step that plain torch takes: loss, gradients, clipping, rates, weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from benchbox.backends.base import StepShape
from benchbox.backends.optimizers import adamw_arguments
from benchbox.backends.replicated import Single
from benchbox.registry.contracts import Losses, Role
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import Session
from benchbox.spec.cell import OptimSpec

if TYPE_CHECKING:
    from benchbox.session import StepResult

OPTIM = OptimSpec(lr=1e-2, schedule="warmup_constant", warmup_steps=4, weight_decay=0.1)
STEPS, ACCUMULATION, MAX_NORM = 3, 2, 0.5


class Affine(nn.Module):
    """One matrix and one vector, and two terms of the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Losses:
        output = self.layer(batch["state"].to(self.layer.weight.dtype)).float()
        square, size = (output - 3.0).square().mean(), output.abs().mean()
        return Losses(square + size, {"square": square.detach(), "size": size.detach()})

    def parameter_roles(self) -> dict[str, Role]:
        return {"layer.weight": Role("head", decay=True), "layer.bias": Role("head", decay=False)}


def micro_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"state": torch.randn(2, 4, generator=generator) * (1 + index)} for index in range(STEPS * ACCUMULATION)]


def steps_of_session(recipe: str) -> tuple[list[StepResult], Affine]:
    policy, backend = Affine(), Single()
    shape = StepShape(batch=2, accumulation=ACCUMULATION, max_grad_norm=MAX_NORM)
    backend.prepare(policy, recipe_by_name(recipe), OPTIM, shape)  # type: ignore[arg-type]
    session, batches = Session(backend, accumulation=ACCUMULATION), iter(micro_batches())
    return [session.step(batches) for _ in range(STEPS)], policy


def steps_of_plain_torch() -> tuple[list[dict[str, float]], Affine]:
    policy, batches = Affine(), micro_batches()
    groups = [
        {"params": [policy.layer.weight], "weight_decay": OPTIM.weight_decay},
        {"params": [policy.layer.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **adamw_arguments(OPTIM))
    results = []
    for step in range(STEPS):
        rate = OPTIM.lr * (step + 1) / (OPTIM.warmup_steps + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = [policy(batch) for batch in batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]]
        mean = torch.stack([loss.total for loss in losses]).mean()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        parts = {name: float(sum(loss.parts[name] for loss in losses)) / ACCUMULATION for name in losses[0].parts}
        results.append({"loss": float(mean.detach()), "grad_norm": float(norm), "lr": rate, **parts})
    return results, policy


def test_losses_norms_rates_and_weights_are_those_of_plain_torch() -> None:
    results, policy = steps_of_session("fp32")
    expected, plain = steps_of_plain_torch()
    assert min(step["grad_norm"] for step in expected) > 2 * MAX_NORM, "every step is clipped"
    for result, step in zip(results, expected, strict=True):
        values = {"loss": float(result.loss), "grad_norm": float(result.grad_norm), "lr": result.lr[0]}
        values |= {name: float(part) for name, part in result.parts.items()}
        assert values == pytest.approx(step, rel=1e-5)
        assert set(result.lr) == {values["lr"]}
        assert result.samples == 2 * ACCUMULATION
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(policy.get_parameter(name), parameter)


def test_the_norm_of_a_step_with_masters_is_that_before_clipping() -> None:
    results, _ = steps_of_session("bf16_master")
    expected, _ = steps_of_plain_torch()
    assert float(results[0].grad_norm) == pytest.approx(expected[0]["grad_norm"], rel=0.02)


class Counting(Affine):
    """Reports a term that only the samples with a positive first number have."""

    def forward(self, batch: dict[str, Tensor]) -> Losses:
        losses = super().forward(batch)
        has_term = batch["state"][:, 0] > 0
        mean = torch.where(has_term, batch["state"][:, 1], 0.0).sum() / has_term.sum().clamp(min=1)
        return losses._replace(parts={**losses.parts, "some": mean}, counts={"some": has_term.sum().float()})


def test_a_term_that_few_samples_have_is_their_mean_over_all_micro_batches() -> None:
    """Micro-batches with 0, 1 and 3 of 4 such samples: a mean of their means would weight these samples differently."""
    states = torch.zeros(3, 4, 4)
    states[..., 0] = torch.tensor([[-1.0, -1, -1, -1], [1, -1, -1, -1], [1, 1, 1, -1]])
    states[..., 1] = torch.arange(12.0).view(3, 4)
    backend, shape = Single(), StepShape(batch=4, accumulation=3, max_grad_norm=MAX_NORM)
    backend.prepare(Counting(), recipe_by_name("fp32"), OPTIM, shape)  # type: ignore[arg-type]
    result = Session(backend, accumulation=3).step({"state": state} for state in states)
    assert float(result.parts["some"]) == pytest.approx((4 + 8 + 9 + 10) / 4)
    assert float(result.part_counts["some"]) == 4
    assert float(result.part_counts["square"]) == 12, "a term without a number is of all samples"


class Noting(Affine):
    """Notes the dtypes of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: dict[str, Tensor], per_sample: bool = False) -> Losses:
        output = self.layer(batch["state"])
        self.dtypes.append(output.dtype)
        return Losses(output.float().square().mean(), {})


def test_an_evaluation_computes_in_the_precision_of_a_step() -> None:
    policy, backend = Noting(), Single()
    shape = StepShape(batch=2, accumulation=1, max_grad_norm=MAX_NORM)
    backend.prepare(policy, recipe_by_name("fp32_autocast"), OPTIM, shape)  # type: ignore[arg-type]
    session, batch = Session(backend, accumulation=1), micro_batches()[0]
    session.step([batch])
    session.evaluate(batch)
    assert policy.dtypes == [torch.bfloat16, torch.bfloat16]
