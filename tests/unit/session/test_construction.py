"""Modules of others are built on the meta device where their code allows it, else directly, with the same weights."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchbox.backends.deferred import deferred_weights
from benchbox.session.construction import DEFERRED, construction_of, seed_rank
from tests.support.foreign import built_directly, constructed, foreign_cell, materialised

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_deferred_weights_are_those_of_direct_construction(checkpointing):
    """Buffers from numpy and non-persistent ones too."""
    deferred = materialised(checkpointing=checkpointing)
    direct = built_directly(checkpointing=checkpointing)
    tensors = [dict((*p.module.named_parameters(), *p.module.named_buffers())) for p in (deferred, direct)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def test_the_record_says_how_a_policy_was_built():
    policy = constructed()
    assert deferred_weights(policy) is not None
    assert construction_of(policy).how == DEFERRED
    assert construction_of(policy).unused == ("unused.bias", "unused.weight")


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ("tiny_reads", "RuntimeError: Tensor.item() cannot be called on meta tensors"),
        ("tiny_table", "UnsupportedError: module.tables['steps'][0] is a tensor outside parameters and buffers"),
    ],
)
def test_a_module_that_cannot_be_built_on_meta_is_built_directly_from_the_same_seed(size, reason):
    policy = constructed(foreign_cell(size=size, seed=3))
    assert deferred_weights(policy) is None
    assert construction_of(policy).how == f"on the cpu, because it cannot be built on the meta device: {reason}"
    direct = built_directly(seed=3, size=size)
    for name, parameter in direct.module.named_parameters():
        assert torch.equal(parameter, dict(policy.module.named_parameters())[name]), name


def test_an_error_in_a_constructor_is_raised_as_it_is(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "policy.py").write_text("def build(preset, axes):\n    raise KeyError('width')\n")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    from benchbox.registry.contracts import Axes
    from benchbox.session.construction import construct_policy

    with pytest.raises(KeyError, match="width"):
        construct_policy(foreign_cell(policy="broken"), Axes(), torch.device("cpu"), [folder])


@pytest.mark.exhaustive
def test_models_of_transformers_that_are_imported_while_they_are_built_have_their_own_weights():
    """transformers 5 skips the initialisation of its models on the meta device."""
    code = (
        "import sys; from tests.support.foreign import *; "
        "assert 'transformers.modeling_utils' not in sys.modules; "
        "cell = foreign_cell(policy='hf:qwen3', attention='sdpa'); "
        "deferred = materialised(cell); direct = built_directly(policy='hf:qwen3', attention='sdpa'); "
        "pairs = zip(deferred.module.named_parameters(), direct.module.named_parameters(), strict=True); "
        "print(sum(not torch.equal(a, b) for (_, a), (_, b) in pairs), sum(1 for _ in direct.parameters()))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    different, parameters = map(int, run.stdout.split()[-2:])
    assert (different, parameters > 30) == (0, True)


def test_the_seed_of_a_cell_decides_what_its_steps_draw():
    draws = []
    for seed in (1, 1, 2):
        seed_rank(seed)
        draws.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
    assert draws[0] == draws[1]
    assert all(one != another for one, another in zip(draws[1], draws[2], strict=True))
