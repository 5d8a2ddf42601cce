"""`benchbox.adapt`: what becomes of a module that was not written for benchbox."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import benchbox
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.contracts import Axes, BatchSpec
from tests.support.foreign import batch_of, built_directly

SPEC = BatchSpec(
    cameras=1,
    image_size=(8, 8),
    state_dim=4,
    action_dim=4,
    horizon=3,
    prompt_tokens=4,
    text_vocab=259,
    action_normalisation="mean_std",
)


def regression(**arguments):
    """A policy that reads benchbox's batch: actions of a chunk from the state."""
    settings = {
        "loss": lambda output, batch: (output.view(-1, 3, 4) - batch["action"]).square().mean(dim=(1, 2)),
        "batch": lambda batch: batch["state"][:, -1],
        "spec": SPEC,
    }
    return benchbox.adapt(nn.Linear(4, 12), **(settings | arguments))


def robot_batch(size=2):
    rows = [SyntheticSamples(SPEC, 0).sample(0, index) for index in range(size)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def statistics(low, high):
    """Return the statistics of a feature in four dimensions: its mean or lower bound, and its deviation or upper bound."""
    return {name: [low] * 4 for name in ("mean", "min", "q01")} | {name: [high] * 4 for name in ("std", "max", "q99")}


def test_the_loss_is_the_mean_over_samples_and_is_there_for_each_of_them():
    policy = built_directly().eval()
    losses = policy(batch_of(policy), per_sample=True)
    sums, counts = losses.per_sample["loss"]
    assert sums.shape == (2,)
    assert losses.total.dtype == torch.float32
    torch.testing.assert_close(losses.total, (sums / counts).mean())


def test_a_generated_sample_does_not_depend_on_the_batch_that_it_is_in():
    policy = built_directly()
    (first,), (again,) = (policy.own_samples(3).sample(0, 7).values() for _ in range(2))
    assert torch.equal(first, again)


def distinct_samples(policy, epochs=(0,)):
    """Return the different ones among ten samples of each of two neighbouring seeds, in each epoch."""
    return {
        tuple(tensor.tolist())
        for seed, epoch, index in product((3, 4), epochs, range(10))
        for tensor in policy.own_samples(seed).sample(epoch, index).values()
    }


def test_neighbouring_seeds_share_no_sample():
    assert len(distinct_samples(built_directly())) == 20


def test_samples_of_the_global_generator_differ_by_seed_epoch_and_index_and_leave_it_alone():
    policy = benchbox.adapt(nn.Linear(2, 2), loss=torch.sum, batch=lambda size, seed: torch.rand(size, 2))
    state = torch.get_rng_state()
    assert len(distinct_samples(policy, epochs=(0, 1))) == 40
    assert torch.equal(torch.get_rng_state(), state)


def test_generated_samples_do_not_seed_the_generators_of_gpus(monkeypatch):
    """A dropout on the GPU would draw the same after equal samples."""
    policy, seeds = built_directly(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    distinct_samples(policy)
    assert seeds == []


def test_state_and_action_are_normalised_by_the_statistics_of_the_dataset():
    policy, seen = regression(), []
    policy._batch = lambda batch: seen.append(batch) or batch["state"][:, -1]
    policy.load_statistics([{"observation.state": statistics(2.0, 4.0), "action": statistics(5.0, 8.0)}])
    batch = robot_batch()
    policy(batch)
    torch.testing.assert_close(seen[0]["action"], (batch["action"] - 5) / 8, atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[0]["state"], batch["state"] - 3, atol=1e-5, rtol=0)  # [2, 4] on [-1, 1]


def test_actions_are_computed_from_the_normalised_state_and_are_in_raw_units():
    policy = regression(act=lambda module, batch: module(batch["state"][:, -1]).view(-1, 3, 4))
    policy.load_statistics([{"observation.state": statistics(2.0, 4.0), "action": statistics(5.0, 8.0)}])
    with torch.no_grad():
        policy.module.weight.fill_(0.25)
        policy.module.bias.fill_(1.0)
    batch = robot_batch()
    actions = policy(batch, act=True)
    normalised = batch["state"][:, -1] - 3  # [2, 4] on [-1, 1]
    expected = (1 + normalised.mean(dim=1)) * 8 + 5
    torch.testing.assert_close(actions, expected.view(2, 1, 1).expand(2, 3, 4), atol=1e-4, rtol=0)


def test_a_policy_without_act_does_not_act():
    with pytest.raises(UnsupportedError, match=r"Linear was adapted without act=\.\.\."):
        regression()(robot_batch(), act=True)


def test_a_policy_that_generates_its_batches_asks_for_synthetic_data():
    with pytest.raises(UnsupportedError, match="Speller generates its batches: write data: synthetic"):
        built_directly().batch_spec()


def test_an_argument_of_the_wrong_form_is_named():
    with pytest.raises(
        ConfigurationError, match=r"adapt\(batch=\.\.\.\): without a spec it must take the batch size and a seed"
    ):
        benchbox.adapt(nn.Linear(2, 2), loss=torch.sum, batch=lambda batch: batch)
    policy = regression(loss=lambda output: output)
    with pytest.raises(ConfigurationError, match=r"adapt\(loss=\.\.\.\): returned a tensor of shape \(2, 12\)"):
        policy(robot_batch())
    policy = benchbox.adapt(nn.Linear(2, 2), loss=torch.sum, batch=lambda size, seed: torch.zeros(3, 2))
    with pytest.raises(
        ConfigurationError, match=r"returned a tensor of shape \(3, 2\) where a tensor with a first dimension of 1"
    ):
        policy.own_samples(0).sample(0, 0)
    with pytest.raises(ConfigurationError, match="Linear has no part of class Block"):
        benchbox.adapt(nn.Linear(2, 2), loss=torch.sum, batch=lambda size, seed: None, units="Block")
    with pytest.raises(ConfigurationError, match="no floating-point buffer 'grid'"):
        regression(cast_buffers="grid")
    for name in ("loss", "roles", "act"):
        with pytest.raises(ConfigurationError, match=rf"adapt\({name}=\.\.\.\): 'mse' cannot be called; give it a function"):
            regression(**{name: "mse"})
    with pytest.raises(ConfigurationError, match=r"adapt\(module\): <class .*Linear'> is no nn\.Module; give it an instance"):
        benchbox.adapt(nn.Linear, loss=torch.sum, batch=lambda size, seed: None)


def test_a_scalar_loss_has_no_values_per_sample():
    policy = regression(loss=lambda output: output.sum())
    losses = policy(robot_batch(), per_sample=True)
    assert losses.total.shape == ()
    assert losses.per_sample is None


def test_flops_have_a_formula_only_if_the_user_gives_one():
    assert not hasattr(regression(), "work")
    assert regression(work=lambda batch: []).work({}) == []


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_state_dict_has_the_names_of_the_module(checkpointing, tmp_path):
    policy = built_directly(checkpointing=checkpointing)
    names = set(built_directly().module.state_dict())
    assert set(policy.state_dict()) == names
    assert "layers.0.attention.in_proj_weight" in names
    ones = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in policy.state_dict().items()}
    save_file(ones, tmp_path / "w.safetensors")
    loaded = policy.load_weights(tmp_path / "w.safetensors")
    assert loaded.missing == loaded.unexpected == ()
    assert all(bool((tensor == 1).all()) for tensor in policy.state_dict().values())


def test_weights_with_another_name_of_a_layer_say_what_is_missing_and_what_is_unexpected(tmp_path):
    policy = built_directly()
    weights = {name.replace("lm_head.", "head."): tensor.contiguous() for name, tensor in policy.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = policy.load_weights(tmp_path / "w.safetensors")
    assert set(loaded.missing) == {"lm_head.weight", "lm_head.bias"}
    assert set(loaded.unexpected) == {"head.weight", "head.bias"}
    assert set(loaded.loaded) == set(weights) - set(loaded.unexpected)


def test_weights_of_another_module_are_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigurationError, match="no tensor has the name of a parameter of Speller"):
        built_directly().load_weights(tmp_path / "other.safetensors")
    save_file({"lm_head.bias": torch.zeros(2)}, tmp_path / "shape.safetensors")
    with pytest.raises(ConfigurationError, match=r"lm_head.bias has shape \(2,\), and \(64,\) is expected"):
        built_directly().load_weights(tmp_path / "shape.safetensors")


def test_checkpointing_computes_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        policy = built_directly(checkpointing=checkpointing)
        torch.manual_seed(1)  # dropout
        policy(batch_of(policy)).total.backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_module_without_layers_cannot_be_checkpointed():
    with pytest.raises(UnsupportedError, match=r"no layers of Linear repeat.*benchbox.adapt\(units="):
        regression().apply_axes(Axes(attention="native", checkpointing=True))


def test_a_module_that_cannot_switch_its_attention_says_so():
    with pytest.raises(UnsupportedError, match="Linear cannot switch its attention kernel: write attention: native"):
        regression().apply_axes(Axes(attention="sdpa"))
    switched = []
    regression(attention=lambda module, kernel: switched.append(kernel)).apply_axes(Axes(attention="eager"))
    assert switched == ["eager"]


def test_parameters_that_no_loss_depends_on_are_frozen():
    policy = built_directly()
    assert policy.freeze_unused_parameters() is None
    assert policy.unused_parameters == ("unused.bias", "unused.weight")
    assert {name for name, p in policy.module.named_parameters() if not p.requires_grad} == {"unused.weight", "unused.bias"}


def test_of_a_policy_that_is_all_frozen_no_parameter_is_unused():
    policy = built_directly().requires_grad_(False)
    assert policy.freeze_unused_parameters() is None
    assert policy.unused_parameters == ()


def test_a_trial_step_leaves_no_trace():
    policy = built_directly()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    state = torch.get_rng_state()
    policy.freeze_unused_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())  # of batch norm too


def test_what_a_trial_step_cannot_find_out_is_unknown_with_a_reason():
    policy = regression(loss=lambda output: output.sum() * float(output.sum()))
    policy.to("meta")
    assert "meta" in policy.freeze_unused_parameters()
    assert policy.unused_parameters == ()
    assert all(p.requires_grad for p in policy.parameters())


def test_roles_may_come_from_the_user():
    role = replace(next(iter(regression().parameter_roles().values())), part="head", tower="expert")
    assert set(regression(roles=lambda name: role).parameter_roles().items()) == {("weight", role), ("bias", role)}
