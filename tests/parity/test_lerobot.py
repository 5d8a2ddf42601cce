"""pi0 and pi05 against lerobot's own package: losses, velocities, gradients, actions and checkpoints in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from benchbox_policies._layers.families.flow import interpolate, time_from_uniform
from benchbox_policies._layers.weights.export import published_state_dict
from benchbox_policies._layers.weights.published import load_published
from safetensors.torch import load_file, save_file

from benchbox.errors import DataError
from benchbox.optim.groups import plan_groups
from benchbox.optim.schedules import rate_factor
from benchbox.spec.optim import OptimSpec
from tests.parity.lerobot import VERSION, requires_lerobot, run_script
from tests.parity.pi import (
    PRESETS,
    REAL_DIMS,
    build_pi,
    lerobot_batch,
    lerobot_gradients,
    lerobot_sizes,
    pi_batch,
    predicting_padding,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Losses, Policy
    from tests.parity.table import ParityTable

pytestmark = requires_lerobot
PADDED_STEPS = torch.arange(10) >= torch.tensor([[6], [10], [3]])  # (B, N)
EMBEDDING, HEAD = "paligemma.model.language_model.embed_tokens.weight", "paligemma.lm_head.weight"


@dataclass(frozen=True)
class Comparison:
    """One policy after one step's forward and backward, and the outputs of lerobot's with the same weights."""

    policy: Policy
    batch: Batch
    losses: Losses
    velocity: Tensor  # (B, N, A)
    theirs: dict[str, Tensor]
    without_gradient: list[str]
    weight_decays: list[float]  # of the groups of lerobot's optimizer
    trained: Path  # lerobot's checkpoint after one step


@pytest.fixture(scope="module", params=PRESETS)
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    policy = build_pi(name)
    batch = pi_batch(policy)
    (folder / "weights").mkdir()
    save_file(published_state_dict(policy), folder / "weights" / "model.safetensors")
    save_file(lerobot_batch(batch) | {"action_is_pad": PADDED_STEPS}, folder / "batch.safetensors")
    (folder / "request.json").write_text(json.dumps(lerobot_sizes(name, policy)))
    run_script("pi", folder)

    policy.zero_grad()
    velocities: list[Tensor] = []
    hook = policy.action_out.register_forward_hook(lambda module, inputs, output: velocities.append(output.detach()))
    losses = policy(batch, per_sample=True)
    hook.remove()
    losses.total.backward()
    return Comparison(
        policy=policy,
        batch=batch,
        losses=losses,
        velocity=velocities[0],
        theirs=load_file(folder / "results.safetensors"),
        **json.loads((folder / "results.json").read_text()),
        trained=folder / "trained",
    )


def policy_name(comparison: Comparison) -> str:
    return type(comparison.policy).__name__.lower()


def test_velocity_and_loss_are_those_of_lerobot(comparison: Comparison, parity: ParityTable) -> None:
    name, batch, theirs = policy_name(comparison), comparison.batch, comparison.theirs
    parity.compare(name, VERSION, "velocity", comparison.velocity, theirs["velocity"])
    _, target = interpolate(batch["action"], batch["noise"][:, 0], time_from_uniform(batch["uniform"][:, 0]))
    parity.compare(name, VERSION, "loss elements", (comparison.velocity - target).square(), theirs["elements"])
    assert comparison.losses.per_sample is not None
    sums, counts = comparison.losses.per_sample["flow"]
    samples = theirs["elements"][..., :REAL_DIMS].mean(dim=(1, 2))
    parity.compare(name, VERSION, "loss of each sample", sums / counts, samples)
    parity.compare(name, VERSION, "loss", comparison.losses.total, theirs["loss"])
    masked = comparison.policy({**batch, "action_is_pad": PADDED_STEPS}).total
    reason = "steps past the end of an episode are masked here, and repeat its last action there"
    parity.compare(name, VERSION, "loss of a batch with padded steps", masked, theirs["loss"], bound=0.2, reason=reason)


def test_gradients_are_those_of_lerobot(comparison: Comparison, parity: ParityTable) -> None:
    """Parameters that are frozen here have no gradient there, or one of zeros."""
    theirs = lerobot_gradients(comparison.theirs, comparison.without_gradient)
    ours = {name: parameter.grad for name, parameter in comparison.policy.named_parameters() if parameter.requires_grad}
    assert {name for name in theirs.keys() - ours.keys() if theirs[name].any()} == set()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    differences = {}
    for name, gradient in ours.items():
        assert gradient is not None, name
        if name.endswith("key.bias"):  # it shifts all scores of a query alike: its gradient is rounding only
            assert max(gradient.abs().max(), theirs[name].abs().max()) < 1e-8 * largest
        else:
            differences[name] = float((gradient - theirs[name]).abs().max() / theirs[name].abs().max())
    worst = max(differences, key=differences.__getitem__)
    quantity = f"gradients: the worst of {len(differences)} parameters"
    parity.compare(policy_name(comparison), VERSION, quantity, ours[worst], theirs[worst])


def test_exported_weights_act_in_lerobot_as_here(comparison: Comparison, parity: ParityTable) -> None:
    actions = comparison.policy.select_actions(predicting_padding(comparison.batch))[..., :REAL_DIMS]
    quantity = "actions of weights exported to it"
    parity.compare(policy_name(comparison), VERSION, quantity, actions, comparison.theirs["actions"])


def test_a_checkpoint_that_lerobot_trained_acts_here_as_there(comparison: Comparison, parity: ParityTable) -> None:
    """Its text embedding was trained, and its output head, which is the same tensor here, was not."""
    policy = build_pi(policy_name(comparison))
    loaded = policy.load_weights(comparison.trained)
    assert loaded.missing == ()
    (note,) = loaded.fitted.values()
    assert EMBEDDING in note
    assert f"{HEAD} differs; no text is predicted" in note
    actions = policy.select_actions(predicting_padding(comparison.batch))[..., :REAL_DIMS]
    theirs = comparison.theirs["trained.actions"]
    assert (comparison.theirs["actions"] - theirs).abs().max() > 1e-2 * theirs.abs().max(), "the step changed the actions"
    parity.compare(policy_name(comparison), VERSION, "actions of a checkpoint that it trained", actions, theirs)


def test_a_checkpoint_that_lerobot_trained_is_refused_by_a_policy_that_predicts_text(comparison: Comparison) -> None:
    with pytest.raises(DataError, match="differ, and are one tensor here"):
        load_published(comparison.policy, comparison.trained, predicts_text=True)


def test_learning_rates_are_those_of_lerobot_but_for_the_step_at_which_the_cosine_begins(
    comparison: Comparison, parity: ParityTable
) -> None:
    optim, steps = OptimSpec(lr=1e-3), range(0, 40_001, 500)  # as in the script
    factor = rate_factor(optim, optim.lr)
    ours, theirs = torch.tensor([factor(step) for step in steps]), comparison.theirs["rates"]
    ends = [index for index, step in enumerate(steps) if step < optim.warmup_steps or step >= optim.total_steps]
    name = policy_name(comparison)
    parity.compare(name, VERSION, "learning rates of the warm-up and after the decay", ours[ends], theirs[ends])
    reason = "the cosine begins at the end of the warm-up here and in openpi, and at step 0 there"
    parity.compare(name, VERSION, "learning rates", ours, theirs, bound=0.035, reason=reason)


def test_lerobot_decays_all_parameters_and_benchbox_only_matrices(comparison: Comparison) -> None:
    optim, policy = OptimSpec(), comparison.policy
    assert comparison.weight_decays == [optim.weight_decay]
    plans = plan_groups(policy, policy.parameter_roles(), optim)
    assert {plan.weight_decay for plan in plans} == {optim.weight_decay, 0.0}
