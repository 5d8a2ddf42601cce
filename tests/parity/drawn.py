"""Configurations of pi0 and pi05 that are drawn at random, among those that lerobot can build too, and batches for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy, policy_entry
from tests.parity.pi import HEADS, PRESETS
from tests.support.policy_batches import make_batch, wake

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, Policy


@dataclass(frozen=True)
class Drawing:
    """A policy with values that replace some of its preset, and a batch: cameras, real dimensions and lengths of prompts."""

    policy: str
    values: dict[str, Any]
    cameras: int
    present: tuple[int, ...]  # numbers of the cameras that are not missing
    state_dims: int
    action_dims: int
    prompt_lengths: tuple[int, ...]  # of the samples of the batch; a prompt may be empty


def draw(seed: int) -> Drawing:
    """Draw a configuration."""
    random = Random(seed)
    vision_heads, patch = random.randint(1, 4), random.randint(3, 9)
    vision = {
        "width": vision_heads * random.choice([4, 6, 8, 16]),
        "depth": random.randint(1, 3),
        "heads": vision_heads,
        "mlp": random.randint(5, 70),
        "patch": patch,
        "image": patch * random.randint(1, 4) + random.randrange(patch),  # pixels beyond the last patch are not read
    }
    backbone = {
        "width": random.choice([8, 36, 72, 100]),
        "depth": random.randint(1, 4),
        "heads": HEADS,
        "kv_heads": random.choice([1, 2, 4, 8]),
        "head_dim": random.choice([2, 6, 8, 16]),
        "mlp": random.randint(4, 150),
    }
    expert = {"width": random.choice([4, 18, 32, 50]), "mlp": random.randint(4, 100)}
    widths = {name: random.choice([1, 7, 32, 40]) for name in ("state_dim", "action_dim")}
    cameras, prompt_tokens = random.randint(1, 4), random.choice([1, 2, 17, 200])
    return Drawing(
        policy=random.choice(list(PRESETS)),
        values={
            "model": {"vision": vision, "backbone": backbone, "expert": expert, "vocabulary": random.choice([259, 1000])},
            "horizon": random.choice([1, 2, 7, 33]),
            "prompt_tokens": prompt_tokens,
            "denoising_steps": random.choice([1, 3, 10, 13]),
            **widths,
        },
        cameras=cameras,
        present=tuple(sorted(random.sample(range(cameras), random.randint(1, cameras)))),
        state_dims=random.randint(1, widths["state_dim"]),
        action_dims=random.randint(1, widths["action_dim"]),
        prompt_lengths=tuple(random.choice([0, 1, prompt_tokens]) for _ in range(random.randint(1, 4))),
    )


def build_drawn(drawing: Drawing) -> tuple[Policy, Batch]:
    """Return the policy after two steps of training, so that no gate of adaRMS is closed, and its batch of whole chunks."""
    torch.manual_seed(0)
    name, size = drawing.policy, PRESETS[drawing.policy]
    build_policy(name, size, Axes())
    values = policy_entry(name).presets[size] | drawing.values
    policy = sys.modules[f"{PACKAGE}.{name}.policy"].build(values, Axes(cams=drawing.cameras))
    batch = make_batch(policy.batch_spec(), len(drawing.prompt_lengths))
    batch["image_mask"][:] = torch.tensor([camera in drawing.present for camera in range(drawing.cameras)])
    batch["prompt_mask"] = torch.arange(batch["prompt_mask"].shape[1]) < torch.tensor(drawing.prompt_lengths)[:, None]
    batch["action_is_pad"][:] = False
    batch["action_dim_mask"] = (torch.arange(batch["action"].shape[-1]) < drawing.action_dims).expand(len(batch["action"]), -1)
    batch["state"][..., drawing.state_dims :] = 0.0
    batch["action"][..., drawing.action_dims :] = 0.0
    wake(policy, batch)
    return policy, batch
