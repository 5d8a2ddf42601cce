"""VITRA: a vision-language model whose last token conditions a diffusion transformer over actions of two hands.

Action dimensions of the left hand: translation 0-2, rotation 3-5, joints 6-50; of the right hand: 51-53, 54-56 and 57-101.
Dimensions from 102 on are unused: they are neither read nor trained, and predicted as the mean of the dataset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser, load_dataset_rows

from .._layers.cost.flops import TokenCount, concat_counts, count_language, is_trainable
from .._layers.families.guidance import classifier_free_guidance
from .._layers.families.losses import combine_losses
from .._layers.families.prefix_policy import ACTION, STATE, PrefixConfig, PrefixPolicy
from .._layers.families.roles import assign_roles, vision_language_tower
from .._layers.families.vision_language import VisionLanguage
from .._layers.nn.decoder import INIT_STD
from .._layers.presets import FORBID_EXTRA, Probability, builder
from .._layers.sequence.presence import drop_from_mask
from .._layers.sequence.token_sequence import Block, concat_blocks
from .diffusion import add_noise, ddim, timestep_from_uniform
from .dit import Dit, DitConfig, DitLayer, count_dit, count_mlp, mlp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec, Role

    from .._layers.cost.flops import FlopTally

PARTS = {"left_6d": slice(0, 6), "left_joints": slice(6, 51), "right_6d": slice(51, 57), "right_joints": slice(57, 102)}
HAND_DIMS = 102  # action dimensions of both hands


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class PartWeights:
    """Weights of the loss parts of a hand."""

    pose: NonNegativeFloat = 1.0  # translation and rotation
    joints: NonNegativeFloat = 1.0


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class VitraConfig(PrefixConfig):
    """Configuration of VITRA: the model, the sizes of its inputs, and its diffusion."""

    dit: DitConfig
    diffusion_steps: PositiveInt = 100
    denoising_steps: PositiveInt = 10
    guidance: PositiveFloat = 5.0
    repeated_samples: PositiveInt = 8  # diffusion samples per pass of the vision-language model
    condition_drop: Probability = 0.1  # independently for each of them
    state_drop: Probability = 0.1
    weights: PartWeights = PartWeights()


class Vitra(PrefixPolicy):
    """A bidirectional prefix whose last token, a learned query, conditions the diffusion transformer."""

    reads_state: ClassVar[bool] = True
    config: VitraConfig
    dims: Tensor  # (datasets, 2) int64: state and action dimensions of each dataset, which a batch for acting does not have

    def __init__(self, config: VitraConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)
        width = config.model.backbone.width
        self.field_of_view = mlp(2, width, width)
        self.cognition = nn.Embedding(1, width)
        for parameter in (*self.field_of_view.parameters(), *self.cognition.parameters()):
            nn.init.normal_(parameter, std=INIT_STD)
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
        """Return images, prompt, field of view and cognition token.

        The two added tokens are multiplied by sqrt(width), as Gemma 2 does with every embedding that it is passed.
        """
        zeros = torch.zeros_like(batch["dataset_index"])[:, None]
        view, cognition = self.field_of_view(batch["field_of_view"])[:, None], self.cognition(zeros)
        scale = self.config.model.backbone.width**0.5
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            Block(name="field of view", hidden=scale * view, valid=zeros == 0, attention="continue"),
            Block(name="cognition", hidden=scale * cognition, valid=zeros == 0, attention="continue"),
        ]

    def drop_inputs(self, batch: Batch) -> Batch:
        history_mask = drop_from_mask(batch["history_mask"], batch["uniform"][:, -1], self.config.state_drop)
        return {**batch, "history_mask": history_mask}

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Return the mean squared error of the predicted noise for each part of the hands that the dataset has.

        Parts are weighted by their number of steps in the sample, so that a hand counts the same whatever its number of joints.

        VITRA weights by the steps of the whole batch, which makes the loss of a sample depend on the others in its batch, and
        the gradient on how a batch is split over ranks and accumulation steps (see `Losses`). The two are equal for a single
        sample. On random batches of 32 with left hands, right hands and both, and chunks cut at the end of an episode, they
        differ by 0.8 % on average and 1.5 % at most; of 8, by 1.7 % and 4.7 % (tiny size, in `tests/parity/test_vitra.py`).
        """
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        condition = self.condition(batch, present)
        draws, train_timesteps = self.config.repeated_samples, self.config.diffusion_steps
        noise, uniform = batch["noise"].float(), batch["uniform"]
        timestep = timestep_from_uniform(uniform[:, :draws], train_timesteps)
        unconditional = (uniform[:, draws : 2 * draws] < self.config.condition_drop) & self.training
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        action_mask = ~batch["action_is_pad"][..., None] & self._hand_dims(batch["action_dim_mask"])[:, None]
        x_t = add_noise(action[:, None], noise, timestep, train_timesteps)

        predicted = self.dit(x_t, action_mask, timestep, condition, unconditional, *self._current_state(batch))

        terms, weights = part_losses(predicted, noise, action_mask, self.config.weights)
        return combine_losses(terms, per_sample=per_sample, weights=weights)

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`.

        The vision-language model runs once; each denoising step runs the transformer with and without the condition.
        """
        batch, present = self.prepare_batch(batch, acting=True)
        condition = self.condition(batch, present)
        noise = batch["noise"][:, 0]
        action_mask = self._hand_dims(self._dataset_dims(batch, 1))[:, None].expand_as(noise)
        unconditional = torch.arange(2, device=noise.device).expand(len(noise), -1) == 1  # (B, 2)
        state, state_mask = self._current_state(batch)

        def epsilon(x_t: Tensor, timestep: Tensor) -> Tensor:
            chunks = x_t[:, None].expand(-1, 2, -1, -1)
            timesteps = timestep.expand_as(unconditional)
            predicted = self.dit(chunks, action_mask, timesteps, condition, unconditional, state, state_mask)
            return classifier_free_guidance(predicted[:, 0], predicted[:, 1], self.config.guidance)

        action = ddim(epsilon, noise, self.config.diffusion_steps, self.config.denoising_steps)
        return self.action_normaliser.denormalise(torch.where(action_mask, action, 0.0), batch["dataset_index"])

    def condition(self, batch: Batch, present: frozenset[str]) -> Tensor:
        """Return the final hidden state of the cognition token: (B, W)."""
        return self.model.norm(self.model(concat_blocks(self.blocks(batch, present)))[:, -1])

    def _current_state(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the current state and the mask of its valid dimensions, both (B, S)."""
        return self.normalised_states(batch)[:, -1], self._dataset_dims(batch, 0) & batch["history_mask"][:, -1:]

    def _dataset_dims(self, batch: Batch, column: int) -> Tensor:
        """Return which dimensions a sample's dataset has of the state (B, S), column 0, or of the action (B, A), column 1."""
        size = (self.config.state_dim, self.config.action_dim)[column]
        dims = self.dims[batch["dataset_index"], column]
        return torch.arange(size, device=dims.device) < dims[:, None]

    @staticmethod
    def _hand_dims(dim_mask: Tensor) -> Tensor:
        """Restrict a mask of action dimensions (B, A) to those of the hands."""
        return dim_mask & (torch.arange(dim_mask.shape[1], device=dim_mask.device) < HAND_DIMS)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        blocks = super().count_blocks(tally, batch, present)
        view = TokenCount(1, count_mlp(tally, self.field_of_view, 1))
        return blocks | {"field of view": view, "cognition": TokenCount(1, is_trainable(self.cognition))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        hidden = count_language(tally, self.model, concat_counts(blocks))
        count_dit(tally, self.dit, self.config.repeated_samples, hidden.requires_grad or is_trainable(self.model.norm))

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return *super().layer_units(), DitLayer

    def parameter_roles(self) -> dict[str, Role]:
        return assign_roles(self, lambda name: "expert" if name.startswith("dit.") else vision_language_tower(name))

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
        load_dataset_rows(self, "dims", torch.tensor(widths))


def part_losses(
    predicted: Tensor, noise: Tensor, action_mask: Tensor, part_weights: PartWeights
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Return squared errors of each part of the hands, summed over a sample, their number, and the part's weight.

    Args:
        predicted: (B, D, N, A), predicted noise.
        noise: (B, D, N, A).
        action_mask: (B, N, A) bool.
        part_weights: relative weights of pose and joints.

    Returns:
        Sum and count of each part, and its weight in the sample's loss: all (B,) float32. For a sample without any valid action
        dimension all are 0.
    """
    errors = torch.where(action_mask[:, None], (predicted.float() - noise).square(), 0.0).sum(dim=(1, 2))  # (B, A)
    counts = action_mask.sum(dim=1) * noise.shape[1]
    terms = {name: (errors[:, dims].sum(dim=1), counts[:, dims].sum(dim=1).float()) for name, dims in PARTS.items()}
    steps = torch.stack([action_mask[..., dims].any(dim=-1).sum(dim=1) for dims in PARTS.values()])  # (parts, B)
    shares = steps / steps.sum(dim=0).clamp(min=1)
    factors = [part_weights.pose, part_weights.joints] * 2
    return terms, {name: factor * share for name, factor, share in zip(PARTS, factors, shares, strict=True)}


build = builder(Vitra, VitraConfig)
