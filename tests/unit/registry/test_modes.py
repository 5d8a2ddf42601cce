"""Modes that policies declare, and refusals before any rank starts."""

import subprocess
import sys

import pytest
import torch

from benchbox.errors import ConfigurationError
from benchbox.registry.contracts import Axes
from benchbox.registry.modes import mode_refusal, policy_modes
from benchbox.registry.policies import PolicyEntry, build_policy, find_policies
from benchbox.spec.train import load_train

ALL = ("policy", "forward_dynamics", "inverse_dynamics", "joint")
TRAINING = "name: t\npolicy: {policy}\nsize: tiny\nbackend: single\nworld_size: 1\nbatch: 1\nsteps: 1\ndata: {{mode: {mode}}}\n"


def test_cosmos_droid_has_all_modes_and_the_other_policies_one():
    modes = {name: policy_modes(entry) for name, entry in find_policies().items()}
    assert modes.pop("cosmos_droid") == ALL
    assert set(modes.values()) == {("policy",)}


def test_sizes_say_nothing_about_modes():
    sizes = {size for entry in find_policies().values() for size in entry.presets}
    assert not [size for size in sizes if "dynamics" in size or "joint" in size]


def test_the_mode_of_the_data_reaches_the_policy(tmp_path):
    torch.manual_seed(0)
    uniforms = {mode: build_policy("cosmos_droid", "tiny", Axes(mode=mode)).batch_spec().uniforms for mode in ALL}
    assert uniforms == {"policy": 2, "forward_dynamics": 2, "inverse_dynamics": 2, "joint": 3}
    file = tmp_path / "t.yaml"
    file.write_text(TRAINING.format(policy="cosmos_droid", mode="inverse_dynamics"))
    assert load_train(file).cell.data.mode == "inverse_dynamics"


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_policy_without_modes_refuses_another_one_before_any_rank_starts(tmp_path, verb):
    file = tmp_path / "t.yaml"
    text = TRAINING.format(policy="pi05", mode="joint")
    file.write_text(text if verb == "train" else text.replace("steps: 1\n", ""))
    command = [sys.executable, "-m", "benchbox.cli.app", verb, str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    line = 8 if verb == "train" else 7
    says = f"{file}:{line}:14: policy pi05 has no modes, and data asks for joint; write mode: policy, or leave it out"
    assert done.stderr == f"error: {says}\n"
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


def test_a_mode_that_does_not_exist_is_named_with_the_nearest(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text(TRAINING.format(policy="pi05", mode="inverse_dynamic"))
    with pytest.raises(ConfigurationError, match="unknown mode \"inverse_dynamic\"; did you mean 'inverse_dynamics'"):
        load_train(file)


def test_building_a_policy_in_a_mode_that_it_does_not_declare_is_refused():
    with pytest.raises(ConfigurationError, match="policy pi0 has no modes, and data asks for joint"):
        build_policy("pi0", "tiny", Axes(mode="joint"))


@pytest.mark.parametrize(
    ("source", "says"),
    [('MODES = ("policy", "dream")', "py:1:1: MODES is a tuple of policy"), ("MODES = f()", "py:1:1: MODES is a tuple")],
)
def test_a_wrong_declaration_is_reported_at_its_line(tmp_path, source, says):
    (tmp_path / "policy.py").write_text(source)
    with pytest.raises(ConfigurationError, match=says):
        policy_modes(PolicyEntry("p", tmp_path, {}))
    (tmp_path / "policy.py").write_text('x = 1\nMODES = ("policy", "joint")')
    assert mode_refusal(PolicyEntry("p", tmp_path, {}), "forward_dynamics") == (
        "policy p has no mode 'forward_dynamics'",
        "one of policy, joint",
    )
