"""VITRA: a token that has read images, prompt and field of view tells a diffusion transformer what two hands are to do.

Of an action the left hand's translation is 0-2, its rotary_cos_sin 3-5 and its joints 6-50; the right hand's are 51-53, 54-56 and
57-101. Dimensions from 102 on are unused: neither read nor learned, and answered with the mean of the dataset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser

from .._layers.cost.flops import TokenCount, count_language, concat_counts, is_trainable
from .._layers.families.context_policy import Probability
from .._layers.families.losses import combine_losses
from .._layers.families.prefix_policy import ACTION, STATE, PrefixConfig, PrefixPolicy
from .._layers.families.roles import roles, vision_language_tower
from .._layers.families.vision_language import VisionLanguage
from .._layers.presets import FORBID_EXTRA, builder
from .._layers.sequence.presence import kept
from .._layers.sequence.token_sequence import Block, concat_blocks
from .diffusion import add_noise, ddim, guided, step_from_uniform
from .dit import Dit, DitConfig, DitLayer, count_dit, count_mlp, mlp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec, Role

    from .._layers.cost.flops import FlopTally

PARTS = {"left_6d": slice(0, 6), "left_joints": slice(6, 51), "right_6d": slice(51, 57), "right_joints": slice(57, 102)}
USED = 102  # dimensions of an action


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class PartWeights:
    """Of the loss, for either hand."""

    pose: NonNegativeFloat = 1.0  # translation and rotary_cos_sin
    joints: NonNegativeFloat = 1.0


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class VitraConfig(PrefixConfig):
    """A preset: the model, the sizes of what it reads, and its diffusion."""

    dit: DitConfig
    diffusion_steps: PositiveInt = 100
    denoising_steps: PositiveInt = 10
    guidance: PositiveFloat = 5.0
    repeated_samples: PositiveInt = 8  # of the diffusion, for every reading
    condition_drop: Probability = 0.1  # of each of them
    state_drop: Probability = 0.1
    weights: PartWeights = PartWeights()


class Vitra(PrefixPolicy):
    """Everything that is read sees everything else. A learned token, the last, gathers what the transformer is told of it."""

    reads_state: ClassVar[bool] = True
    config: VitraConfig
    dims: Tensor  # (datasets, 2) int64: how many a dataset has of state and action, which no frame says when acting

    def __init__(self, config: VitraConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)
        width = config.model.backbone.width
        self.field_of_view = mlp(2, width, width)
        self.cognition = nn.Embedding(1, width)
        self.dit = Dit(
            config.dit,
            axes,
            condition_width=width,
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            horizon=config.horizon,
        )
        self.action_normaliser = Normaliser(config.action_dim, self.spec.action_normalisation)
        self.register_buffer("dims", torch.tensor([[config.state_dim, config.action_dim]]))

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:  # noqa: ARG002
        one = torch.zeros_like(batch["dataset_index"])[:, None]
        view = self.field_of_view(batch["field_of_view"])[:, None]
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            Block(name="field of view", hidden=view, valid=one == 0, attention="continue"),
            Block(name="cognition", hidden=self.cognition(one), valid=one == 0, attention="continue"),
        ]

    def dropped(self, batch: Batch) -> Batch:
        return {**batch, "history_mask": kept(batch["history_mask"], batch["uniform"][:, -1], self.config.state_drop)}

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """The noise in every part of the hands that the dataset has, each the mean of its squared errors.

        The parts of a sample are weighted by how many steps it has of them, so that a hand counts once whatever its joints.
        (VITRA weights by those of a whole batch; here what a sample counts for does not depend on what it is beside.)
        """
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        condition = self.condition(batch, present)
        draws, steps = self.config.repeated_samples, self.config.diffusion_steps
        noise, uniform = batch["noise"].float(), batch["uniform"]
        step = step_from_uniform(uniform[:, :draws], steps)
        alone = (uniform[:, draws : 2 * draws] < self.config.condition_drop) & self.training
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        real = ~batch["action_is_pad"][..., None] & self._used(batch["action_dim_mask"])[:, None]

        predicted = self.dit(
            add_noise(action[:, None], noise, step, steps), real, step, condition, alone, *self._known_state(batch)
        )

        terms, shares = part_losses(predicted, noise, real, self.config.weights)
        return combine_losses(terms, per_sample=per_sample, shares=shares)

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`. All is read once; each step runs the transformer with the condition and
        without.
        """
        batch, present = self.prepare_batch(batch, acting=True)
        condition = self.condition(batch, present)
        noise = batch["noise"][:, 0]
        real = self._used(self._had(batch, 1))[:, None].expand_as(noise)
        alone = torch.arange(2, device=noise.device).expand(len(noise), -1) == 1  # (B, 2)
        state, known = self._known_state(batch)

        def epsilon(point: Tensor, step: Tensor) -> Tensor:
            chunks = point[:, None].expand(-1, 2, -1, -1)
            predicted = self.dit(chunks, real, step.expand_as(alone), condition, alone, state, known)
            return guided(predicted[:, 0], predicted[:, 1], self.config.guidance)

        action = ddim(epsilon, noise, self.config.diffusion_steps, self.config.denoising_steps)
        return self.action_normaliser.denormalise(torch.where(real, action, 0.0), batch["dataset_index"])

    def condition(self, batch: Batch, present: frozenset[str]) -> Tensor:
        """What the last token has gathered: (B, W)."""
        return self.model.norm(self.model(concat_blocks(self.blocks(batch, present)))[:, -1])

    def _known_state(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The current state and what of it is known, both (B, S)."""
        return self.states(batch)[:, -1], self._had(batch, 0) & batch["history_mask"][:, -1:]

    def _had(self, batch: Batch, which: int) -> Tensor:
        """Which dimensions a sample's dataset has of the state (B, S), or of the action (B, A)."""
        size = (self.config.state_dim, self.config.action_dim)[which]
        had = self.dims[batch["dataset_index"], which]
        return torch.arange(size, device=had.device) < had[:, None]

    @staticmethod
    def _used(dims: Tensor) -> Tensor:
        """Those of some action dimensions (B, A) that belong to a hand."""
        return dims & (torch.arange(dims.shape[1], device=dims.device) < USED)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        blocks = super().count_blocks(tally, batch, present)
        view = TokenCount(1, count_mlp(tally, self.field_of_view, 1))
        return blocks | {"field of view": view, "cognition": TokenCount(1, is_trainable(self.cognition))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        hidden = count_language(tally, self.model, concat_counts(blocks))
        count_dit(tally, self.dit, self.config.repeated_samples, hidden.below or is_trainable(self.model.norm))

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return *super().layer_units(), DitLayer

    def parameter_roles(self) -> dict[str, Role]:
        return roles(self, lambda name: "expert" if name.startswith("dit.") else vision_language_tower(name))

    def batch_spec(self) -> BatchSpec:
        draws = self.config.repeated_samples
        return replace(
            super().batch_spec(),
            field_of_view=True,
            uniforms=2 * draws + 1,
            noise_draws=draws,
            state_normalisation="mean_std",
        )

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        super().load_statistics(statistics)
        self.action_normaliser.load([features[ACTION] for features in statistics])
        widths = [[len(features[name]["mean"]) for name in (STATE, ACTION)] for features in statistics]
        self.dims.copy_(torch.tensor(widths))


def part_losses(
    predicted: Tensor, noise: Tensor, real: Tensor, weights: PartWeights
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Of each part of the hands its squared errors and their number, summed over a sample, and its share in the sample's loss.

    Args:
        predicted: (B, D, N, A).
        noise: (B, D, N, A).
        real: (B, N, A) bool.

    Returns:
        Sum and count, and the share: all (B,) float32. Of a sample that has nothing all are 0.
    """
    errors = torch.where(real[:, None], (predicted.float() - noise).square(), 0.0).sum(dim=(1, 2))  # (B, A)
    counts = real.sum(dim=1) * noise.shape[1]
    terms = {name: (errors[:, dims].sum(dim=1), counts[:, dims].sum(dim=1).float()) for name, dims in PARTS.items()}
    steps = torch.stack([real[..., dims].any(dim=-1).sum(dim=1) for dims in PARTS.values()])  # (parts, B)
    shares = steps / steps.sum(dim=0).clamp(min=1)
    weight = [weights.pose, weights.joints] * 2
    return terms, {name: factor * share for name, factor, share in zip(PARTS, weight, shares, strict=True)}


build = builder(Vitra, VitraConfig)
