"""Without the padding that all samples of a batch share, every policy has the same losses and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.data.loading.trimming import MULTIPLE, trim
from benchbox.theory.flops import total_cost, training_cost
from tests.support.policy_batches import POLICIES, build_on_meta, gradients, make_batch
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Batch, BatchSpec, Policy

TEXTS = ("prompt", "response", "memory", "metadata", "fast")
FIXED_CAMERAS = ("cosmos_droid",)  # whose tokens have positions by the slot of their camera

every = pytest.mark.parametrize("name", POLICIES)


def padded_batch(spec: BatchSpec) -> Batch:
    """Return a batch of 4 with short texts, without the first and the last of its cameras."""
    batch = make_batch(spec, 4)
    for text in TEXTS:
        if f"{text}_mask" in batch:
            batch[f"{text}_mask"][..., MULTIPLE + 1 :] = False
    for name in ("image_mask", "subgoal_mask"):
        if name in batch:
            batch[name][..., 0] = batch[name][..., -1] = False
    return batch


def step(policy: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the gradient of every parameter that has one."""
    policy.zero_grad()
    total = policy(batch).total
    total.backward()
    return total, {name: gradient.clone() for name, gradient in gradients(policy).items() if gradient is not None}


@every
@pytest.mark.parametrize("attention", in_tiers(("sdpa", "eager"), lambda attention: attention == "sdpa"))
@pytest.mark.parametrize("training", [True, False])
def test_losses_and_gradients_are_those_of_the_whole_batch(
    name: str, attention: str, training: bool, awake: Callable[..., tuple[Policy, Batch]]
) -> None:
    """In training inputs are dropped too; otherwise all optional parts are there."""
    policy, _ = awake(name, cams=4, attention=attention)
    policy.train(training)
    spec = policy.batch_spec()
    batch = padded_batch(spec)
    (trimmed,) = trim([batch], spec.trimmable)
    expected, expected_gradients = step(policy, batch)

    total, trimmed_gradients = step(policy, trimmed)

    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert trimmed_gradients.keys() == expected_gradients.keys(), "a parameter has a gradient in one of both steps"
    assert len(trimmed_gradients) > 20
    for key, expected_gradient in expected_gradients.items():
        torch.testing.assert_close(trimmed_gradients[key], expected_gradient, rtol=1e-3, atol=1e-5, msg=key)


@every
def test_a_trimmed_batch_has_the_cameras_of_its_samples_and_texts_of_the_next_multiple(name: str) -> None:
    spec = build_on_meta(name, "tiny", cams=4).batch_spec()
    batch = padded_batch(spec)
    (trimmed,) = trim([batch], spec.trimmable)
    assert trimmed["images"].shape[2] == trimmed["image_mask"].shape[2] == (4 if name in FIXED_CAMERAS else 2)
    assert trimmed["prompt_tokens"].shape == trimmed["prompt_mask"].shape == (4, 2 * MULTIPLE)
    for text in TEXTS:
        if f"{text}_mask" in batch:
            assert trimmed[f"{text}_tokens"].shape[-1] == min(2 * MULTIPLE, batch[f"{text}_mask"].shape[-1])
    assert trimmed.keys() == batch.keys()


@every
def test_the_formula_counts_fewer_flops_for_a_trimmed_batch(name: str) -> None:
    policy = build_on_meta(name, "tiny", cams=4)
    spec = policy.batch_spec()
    batch = padded_batch(spec)
    (trimmed,) = trim([batch], spec.trimmable)
    whole, less = (
        total_cost(training_cost(policy.work({key: value.to("meta") for key, value in values.items()})))
        for values in (batch, trimmed)
    )
    assert less.model < whole.model
