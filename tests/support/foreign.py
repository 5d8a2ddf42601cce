"""Modules of others, adapted: the policy `foreign`, and a small one that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchbox.backends.deferred import materialise_policy
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.session.construction import construct_policy
from tests.support.ranks import tiny_cell

FOLDER = Path(__file__).parents[1] / "integration" / "policies" / "foreign"
KERNEL: Any = "native"
ADAPTED = """\
import benchbox
from benchbox.registry.contracts import BatchSpec
from torch import nn

SPEC = BatchSpec(
    cameras=1, image_size=(16, 16), state_dim=8, action_dim=8, horizon=5, first_action=FIRST, prompt_tokens=4, text_vocab=259
)

def build(preset, axes):
    module = nn.Linear(8, 40)
    module.bias.sum().item()  # which the meta device does not have
    return benchbox.adapt(
        module,
        spec=SPEC,
        batch=lambda batch: batch["state"][:, -1],
        loss=lambda output, batch: (output.view(-1, 5, 8) - batch["action"]).square().mean(),
        act=lambda module, batch: module(batch["state"][:, -1]).view(-1, 5, 8)[:, -SPEC.acting_horizon :],
    )
"""


def foreign_cell(**changes: Any) -> Any:
    return tiny_cell(**{"policy": "foreign", "attention": KERNEL, **changes})


def built_directly(seed: int = 0, size: str = "tiny", policy: str = "foreign", **axes: Any) -> Any:
    """Build a policy on the CPU as its code says."""
    torch.manual_seed(seed)
    return build_policy(policy, size, Axes(**{"attention": KERNEL, **axes}), [FOLDER])


def constructed(cell: Any = None, **axes: Any) -> Any:
    """Construct the policy of a cell as a rank does. Its weights are not there yet if it could be built on the meta device."""
    cell = cell or foreign_cell()
    return construct_policy(cell, Axes(**{"attention": cell.attention, **axes}), torch.device("cpu"), [FOLDER])


def materialised(cell: Any = None, **axes: Any) -> Any:
    policy = constructed(cell, **axes)
    materialise_policy(policy)
    return policy


def batch_of(policy: Any, size: int = 2) -> dict[str, torch.Tensor]:
    rows = [policy.own_samples(0).sample(0, index) for index in range(size)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def write_adapted_policy(folder: Path, first_action: int = 0) -> None:
    """Write the policy `adapted` into a folder of policies: it reads datasets, acts, and cannot be built on the meta device.

    Args:
        first_action: of its chunks of 5 actions, counted from the current frame.
    """
    (folder / "adapted").mkdir(parents=True)
    (folder / "adapted" / "policy.py").write_text(ADAPTED.replace("FIRST", str(first_action)))
    (folder / "adapted" / "presets.yaml").write_text("tiny: {}\n")
