"""cosmos_droid: future frames and actions denoised together (NVIDIA's Cosmos 3 Nano, fine-tuned on DROID).

`latents.encode` stands in for the video tokenizer; override `CosmosDroid.latents` to use another one. The published 16 B
parameters include a vision tower and a text head, neither of which takes part in a training step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from benchbox.data.normalisation import Normaliser
from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import BatchSpec

from .._layers.cost.flops import FlopTally, TokenCount, count_language_action, is_trainable
from .._layers.families.flow import denoise, embed_time, flow_loss, interpolate
from .._layers.families.losses import combine_losses
from .._layers.families.prefix_policy import ACTION, PrefixPolicy
from .._layers.nn.decoder import DecoderConfig
from .._layers.nn.precision import Linear
from .._layers.presets import FORBID_EXTRA, builder
from .._layers.sequence.token_sequence import Block, TokenSequence, concat_blocks
from .latents import LATENT_CHANNELS, PATCH, SPATIAL_FACTOR, TEMPORAL_FACTOR, TOKEN_DIM, encode, grid_positions, patchify
from .mixture import Mixture, MixtureLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from benchbox.registry.contracts import Axes, Batch

    from .._layers.families.vision_language import KVCache

Side = Annotated[int, Field(gt=0, multiple_of=SPATIAL_FACTOR * PATCH)]
Task = Literal["policy", "forward_dynamics", "inverse_dynamics"]

TASKS: tuple[Task, ...] = ("policy", "forward_dynamics", "inverse_dynamics")
LOSS_WEIGHT = 10.0  # of either term
MARGIN = 15_000  # positions between the text and the generated tokens
BASE_FPS = 24  # at this rate a latent frame is one position long
TIME_CHANNELS = 256


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class CosmosConfig:
    """Configuration of cosmos_droid.

    The mode `policy` denoises the future and the actions, `forward_dynamics` the future conditioned on the actions, and
    `inverse_dynamics` the actions conditioned on the future; `joint` chooses one of these at random for every sample.
    """

    model: DecoderConfig
    vocabulary: PositiveInt
    image: tuple[Side, Side]  # height and width, in pixels
    horizon: Annotated[int, Field(gt=0, multiple_of=TEMPORAL_FACTOR)]  # steps, and frames after the current one
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    mode: Task | Literal["joint"] = "policy"
    fps: PositiveInt = 15
    denoising_steps: PositiveInt = 10

    @property
    def state_dim(self) -> int:
        """Size of a state, equal to that of an action, because both are joint positions."""
        return self.action_dim


class Conditioning(NamedTuple):
    """Inputs that no mode denoises, and the layout of all generated tokens: current frame, future, state, actions."""

    text: TokenSequence
    current: Tensor  # (B, V, 192): tokens of the current frame
    state: Tensor  # (B, 1, A), normalised
    valid: Tensor  # (B, S) bool, of all generated tokens
    positions: Tensor  # (B, S, 3) int64, of all generated tokens


class CosmosDroid(PrefixPolicy):
    """A causal prompt, and generated tokens that attend to it and to one another: current frame, future, state and actions.

    Future and actions have the same time. As published, its embedding is added to their tokens; conditioning tokens get the
    embedding of time 0, where the published model adds none.
    """

    reads_state: ClassVar[bool] = True
    model: Mixture  # type: ignore[assignment]  # has the layers of a vision-language-action model, but no vision tower
    config: CosmosConfig

    def __init__(self, config: CosmosConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        width = config.model.width
        # Positions are multiplied by this, so that a frame is a whole number of them: BASE_FPS.
        self.stretch = TEMPORAL_FACTOR * config.fps
        self.model = Mixture(config.model, config.vocabulary, axes, stretch=self.stretch)
        self.latent_in = Linear(TOKEN_DIM, width)
        self.latent_out = Linear(width, TOKEN_DIM)
        self.action_in = Linear(config.action_dim, width)
        self.action_out = Linear(width, config.action_dim)
        self.time_in = Linear(TIME_CHANNELS, width)
        self.time_out = Linear(width, width)
        self.action_normaliser = Normaliser(config.action_dim, self.spec.action_normalisation)

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Return the flow losses of future and actions; on a part that conditions a sample, its sum and count are 0."""
        if act:
            return self.select_actions(batch)
        batch, _ = self.prepare_batch(batch)
        latents = self.latents(batch)
        conditioning = self.conditioning(batch, latents[:, :1], batch["future_mask"])
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        condition_mask = self.condition_mask(batch["uniform"])
        times = torch.where(condition_mask, 0.0, logit_normal(batch["uniform"][:, :1]))  # (B, 2)
        future_t, future_u = interpolate(patchify(latents[:, 1:]), patchify(batch["latent_noise"].float()), times[:, 0])
        action_t, action_u = interpolate(action, batch["noise"][:, 0].float(), times[:, 1])

        future_v, action_v = self.velocity(conditioning, future_t, action_t, times)

        start, number = conditioning.current.shape[1], future_t.shape[1]
        future_is_pad = ~conditioning.valid[:, start : start + number] | condition_mask[:, :1]
        action_is_pad = batch["action_is_pad"] | condition_mask[:, 1:]
        all_dims = torch.ones_like(future_u[:, 0], dtype=torch.bool)
        terms = {
            "vision": flow_loss(future_v, future_u, future_is_pad, all_dims),
            "action": flow_loss(action_v, action_u, action_is_pad, batch["action_dim_mask"]),
        }
        weighted = {name: (LOSS_WEIGHT * error, count) for name, (error, count) in terms.items()}
        return combine_losses(weighted, per_sample=per_sample)

    def latents(self, batch: Batch) -> Tensor:
        """Return latents of the current frame, and of the future if the batch has it.

        Returns:
            (B, G, C, 48, h, w) float32, of about unit variance.
        """
        current = batch["images"][:, -1:]
        return encode(torch.cat((current, batch["future_images"]), dim=1) if "future_images" in batch else current)

    def conditioning(self, batch: Batch, current: Tensor, future_mask: Tensor) -> Conditioning:
        """Return the inputs that are not denoised.

        Args:
            batch: only fields available at inference are used.
            current: (B, 1, C, 48, h, w), the latents of the current frame.
            future_mask: (B, F) bool, which future frames are valid. A latent is valid if all of its frames are.
        """
        text = concat_blocks([self.text("prompt", batch, "causal")])
        device = future_mask.device
        rows, columns = (side // (SPATIAL_FACTOR * PATCH) for side in self.config.image)
        frames = F.pad(future_mask.unflatten(1, (-1, TEMPORAL_FACTOR)).all(dim=2), (1, 0), value=True)  # (B, G)
        video = (frames[:, :, None] & batch["image_mask"][:, -1:]).flatten(1).repeat_interleave(rows * columns, dim=1)
        steps = torch.arange(1 + self.config.horizon, device=device)  # of the state and the actions that follow it
        video_positions = grid_positions((frames.shape[1], self.cameras, rows, columns), device)
        time, row, column = torch.cat((video_positions, F.pad(steps[:, None], (0, 2)))).unbind(dim=1)
        start = self.stretch * (text.visible_to_suffix.sum(dim=1, keepdim=True) + MARGIN)
        axes = start + BASE_FPS * time, self.stretch * row, self.stretch * column
        return Conditioning(
            text=text,
            current=patchify(current),
            state=self.normalised_states(batch)[:, -1:],
            valid=F.pad(video, (0, len(steps)), value=True),
            positions=torch.stack(torch.broadcast_tensors(*axes), dim=-1),
        )

    def condition_mask(self, uniform: Tensor) -> Tensor:
        """Return whether future and actions are conditions that are not denoised: (B, 2) bool.

        In the mode `joint` the last number of `uniform` (B, U) decides.
        """
        if self.config.mode == "joint":
            task = (uniform[:, -1] * len(TASKS)).long()
        else:
            task = torch.full_like(uniform[:, -1], TASKS.index(self.config.mode)).long()
        return torch.stack((task == TASKS.index("inverse_dynamics"), task == TASKS.index("forward_dynamics")), dim=1)

    def velocity(
        self, conditioning: Conditioning, future_t: Tensor, action_t: Tensor, times: Tensor, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities v_t of noisy future tokens (B, M, 192) and noisy actions (B, N, A) at `times` (B, 2)."""
        embedded = embed_time(F.pad(times, (1, 0)).flatten(), TIME_CHANNELS)
        embedded = self.time_out(F.silu(self.time_in(embedded))).unflatten(0, (-1, 3))
        condition_time, future_time, action_time = embedded.split(1, dim=1)
        hidden = torch.cat(
            (
                self.latent_in(conditioning.current) + condition_time,
                self.latent_in(future_t) + future_time,
                self.action_in(conditioning.state) + condition_time,
                self.action_in(action_t) + action_time,
            ),
            dim=1,
        )
        block = Block(name="generated", hidden=hidden, valid=conditioning.valid, attention="bidirectional")
        output = self.model(conditioning.text, concat_blocks([block]), conditioning.positions, cache)
        start, steps = conditioning.current.shape[1], action_t.shape[1]
        return self.latent_out(output[:, start : start + future_t.shape[1]]), self.action_out(output[:, -steps:])

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`. The prompt is computed once; future and actions are denoised together."""
        if self.config.mode in ("forward_dynamics", "inverse_dynamics"):
            raise UnsupportedError(f"in the mode {self.config.mode} cosmos_droid is not trained to act")
        batch, _ = self.prepare_batch(batch, acting=True)
        noise = patchify(batch["latent_noise"]), batch["noise"][:, 0]
        future_mask = torch.ones_like(noise[1][..., 0], dtype=torch.bool)  # as many frames as steps
        conditioning = self.conditioning(batch, self.latents(batch)[:, :1], future_mask)
        cache = self.model.prefill(conditioning.text)
        sizes = [part[0].numel() for part in noise]

        def velocity(x_t: Tensor, time: Tensor) -> Tensor:
            future_t, action_t = (part.view_as(like) for part, like in zip(x_t.split(sizes, dim=1), noise, strict=True))
            return concat_flat(self.velocity(conditioning, future_t, action_t, time[:, None].expand(-1, 2), cache))

        action = denoise(velocity, concat_flat(noise), self.config.denoising_steps)[:, sizes[0] :].view_as(noise[1])
        return self.action_normaliser.denormalise(action, batch["dataset_index"])

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:  # noqa: ARG002
        return {"prompt": TokenCount(batch["prompt_tokens"].shape[1], is_trainable(self.model.vocabulary))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        groups, cameras, _, height, width = self.spec.latent_shape
        frame, steps = cameras * height * width // PATCH**2, self.config.horizon
        time = tally.count_linear(self.time_out, 3, tally.count_linear(self.time_in, 3, input_requires_grad=False))
        video = tally.count_linear(self.latent_in, (1 + groups) * frame, input_requires_grad=False)
        action = tally.count_linear(self.action_in, 1 + steps, input_requires_grad=False)
        tokens = TokenCount((1 + groups) * frame + 1 + steps, time or video or action)
        _, generated = count_language_action(tally, self.model, blocks["prompt"], tokens, None)  # type: ignore[arg-type]
        tally.count_linear(self.latent_out, groups * frame, generated.requires_grad)
        tally.count_linear(self.action_out, steps, generated.requires_grad)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (MixtureLayer,)

    def batch_spec(self) -> BatchSpec:
        config = self.config
        height, width = config.image
        latent_size = height // SPATIAL_FACTOR, width // SPATIAL_FACTOR
        return BatchSpec(
            cameras=self.cameras,
            image_size=config.image,
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            horizon=config.horizon,
            prompt_tokens=config.prompt_tokens,
            text_vocab=config.vocabulary,
            future=config.horizon,
            uniforms=2 if config.mode == "joint" else 1,
            latent_shape=(config.horizon // TEMPORAL_FACTOR, self.cameras, LATENT_CHANNELS, *latent_size),
            state_normalisation="mean_std",
        )

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        super().load_statistics(statistics)
        self.action_normaliser.load([features[ACTION] for features in statistics])


def logit_normal(uniform: Tensor) -> Tensor:
    """Map uniform numbers to logit-normal times in float32, by inverse distribution function (arXiv:2403.03206)."""
    return torch.special.ndtri(uniform.float()).sigmoid()


def concat_flat(parts: tuple[Tensor, ...]) -> Tensor:
    """Flatten each part (B, ...) and concatenate them: (B, K)."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


build = builder(CosmosDroid, CosmosConfig)
