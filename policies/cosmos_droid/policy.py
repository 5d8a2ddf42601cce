"""cosmos_droid: future frames and actions denoised together (NVIDIA's Cosmos 3 Nano, fine-tuned on DROID).

`latents.encode` stands in for the video tokenizer; override `CosmosDroid.latents` to use another one. The published 16 B
parameters include a vision tower and a text head, neither of which takes part in a training step.

The recipe is `action_policy_droid_nano` of NVIDIA/cosmos-framework, whose mode `wam` is the mode `policy` here. The differences
below are kept. Effects were measured on the tiny size after 600 steps on one batch.

- Actions are sampled in ten equal Euler steps, as by the flow policies. The published server for DROID takes four steps of
  UniPC with a shift of 5. Ten equal Euler steps end 3 % from the limit of many steps, four shifted Euler steps 19 %.
- A dropped prompt is masked whole, because a batch does not tell its words from the markup around them. The published one keeps
  ten tokens of chat markup. Keeping two tokens changes the loss by 0.02 %.
- The prompt is the task in plain text, as for every policy. The published one is JSON with viewpoint, rate and duration too.
- Cameras stand side by side in the positions of their tokens. The published recipe composes three cameras into one image.
- Steps after the end of an episode are masked. The published data has no such chunks.
- Biases, norms and embeddings have no weight decay, as in every policy. The published recipe decays all that trains, by 1e-5 of
  a weight in a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchbox.data.normalisation import Normaliser
from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import BatchSpec

from .._layers.cost.flops import FlopTally, TokenCount, count_language_action, is_trainable
from .._layers.families.flow import denoise, flow_loss, interpolate
from .._layers.families.guidance import classifier_free_guidance
from .._layers.families.losses import combine_losses
from .._layers.families.prefix_policy import ACTION, PrefixPolicy
from .._layers.nn.precision import Linear
from .._layers.nn.timestep import embed_timestep
from .._layers.presets import builder
from .._layers.sequence.presence import drop_from_mask
from .._layers.sequence.token_sequence import Block, TokenSequence, concat_blocks
from .config import DOMAINS, TASKS, CosmosConfig
from .domains import DomainLinear
from .latents import LATENT_CHANNELS, PATCH, SPATIAL_FACTOR, TEMPORAL_FACTOR, TOKEN_DIM, encode, grid_positions, patchify
from .mixture import Mixture, MixtureLayer
from .times import waver_time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, Role

    from .._layers.families.vision_language import KVCache

MODES = ("policy", "forward_dynamics", "inverse_dynamics", "joint")
LOSS_WEIGHT = 10.0  # of either term
MARGIN = 15_000  # positions between the text and the generated tokens
BASE_FPS = 24  # at this rate a latent frame is one position long
TIME_CHANNELS = 256


class Conditioning(NamedTuple):
    """Inputs that no mode denoises, and the layout of all generated tokens: current frame, future, state, actions."""

    text: TokenSequence
    current: Tensor  # (B, V, 192): tokens of the current frame
    state: Tensor  # (B, 1, A), normalised
    valid: Tensor  # (B, S) bool, of all generated tokens
    positions: Tensor  # (B, S, 3) int64, of all generated tokens


class CosmosDroid(PrefixPolicy):
    """A causal prompt, and generated tokens that attend to it and to one another: current frame, future, state and actions.

    The mode `policy` denoises the future and the actions, `forward_dynamics` the future conditioned on the actions, and
    `inverse_dynamics` the actions conditioned on the future; `joint` chooses one of these at random for every sample.

    Future and actions have the same time. Its embedding is added to the tokens that are denoised, and to no others. Actions and
    state share layers, whose weights are those of the robot's domain, and a learned vector that marks them. Only the layers of
    generated tokens train, with the layers outside them: the prompt is read by a frozen Qwen3.
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
        self.action_in = DomainLinear(config.action_dim, width, DOMAINS)
        self.action_out = DomainLinear(width, config.action_dim, DOMAINS)
        self.action_modality = nn.Embedding(1, width)
        self.time_in = Linear(TIME_CHANNELS, width)
        self.time_out = Linear(width, width)
        for linear in (self.latent_in, self.latent_out, self.time_in, self.time_out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)
        nn.init.normal_(self.action_modality.weight, std=width**-0.5)
        self.action_normaliser = Normaliser(config.action_dim, self.spec.action_normalisation)

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Return the flow losses of future and actions, each a mean over all frames or steps of the sample.

        As published, the frame and the state that condition the sample are among them, with an error of 0. Of a part that is
        only a condition, sum and count are 0.
        """
        if act:
            return self.select_actions(batch)
        batch, _ = self.prepare_batch(batch)
        latents, dims = self.latents(batch), batch["action_dim_mask"]
        conditioning = self.conditioning(batch, latents[:, :1], batch["future_mask"])
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        condition_mask = self.condition_mask(batch["uniform"])
        time = waver_time(batch["uniform"][:, 0], self.config.time_shift)
        times = torch.where(condition_mask, 0.0, time[:, None])  # (B, 2)
        future_t, future_u = interpolate(patchify(latents[:, 1:]), patchify(batch["latent_noise"].float()), times[:, 0])
        action_t, action_u = interpolate(action, batch["noise"][:, 0].float(), times[:, 1])

        future_v, action_v = self.velocity(conditioning, future_t, mask_dims(action_t, dims), time, condition_mask)

        start, number = conditioning.current.shape[1], future_t.shape[1]
        current_valid, future_valid, _ = conditioning.valid.tensor_split((start, start + number), dim=1)
        all_dims = torch.ones_like(future_u[:, 0], dtype=torch.bool)
        errors = {
            "vision": flow_loss(future_v, future_u, ~future_valid | condition_mask[:, :1], all_dims),
            "action": flow_loss(action_v, action_u, batch["action_is_pad"] | condition_mask[:, 1:], dims),
        }
        conditions = {"vision": current_valid.sum(dim=1) * TOKEN_DIM, "action": dims.sum(dim=1)}
        terms = {
            name: (LOSS_WEIGHT * error, torch.where(count > 0, count + conditions[name], 0.0))
            for name, (error, count) in errors.items()
        }
        return combine_losses(terms, per_sample=per_sample)

    def drop_inputs(self, batch: Batch) -> Batch:
        """Drop prompts whose second `uniform` number is below the drop probability."""
        prompt_mask = drop_from_mask(batch["prompt_mask"], batch["uniform"][:, 1], self.config.caption_drop)
        return {**batch, "prompt_mask": prompt_mask}

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
        if self.mode == "joint":
            task = (uniform[:, -1] * len(TASKS)).long()
        else:
            task = torch.full_like(uniform[:, -1], TASKS.index(self.mode)).long()
        return torch.stack((task == TASKS.index("inverse_dynamics"), task == TASKS.index("forward_dynamics")), dim=1)

    def velocity(
        self,
        conditioning: Conditioning,
        future_t: Tensor,
        action_t: Tensor,
        time: Tensor,
        condition_mask: Tensor,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities v_t of future tokens and actions.

        Args:
            conditioning: inputs that are not denoised.
            future_t: (B, M, 192), noisy, or clean where they are conditions.
            action_t: (B, N, A), noisy, or clean where they are conditions; 0 beyond the dimensions of the dataset.
            time: (B,), of everything that is noisy.
            condition_mask: (B, 2) bool, whether future and actions are conditions.
            cache: of the prompt, from `Mixture.prefill`.
        """
        embedded = self.time_out(F.silu(self.time_in(embed_timestep(time, TIME_CHANNELS))))
        future_time, action_time = torch.where(condition_mask[..., None], 0.0, embedded[:, None]).split(1, dim=1)
        actions = self.action_in(torch.cat((conditioning.state, action_t), dim=1), self.config.domain)
        actions = actions + self.action_modality(torch.zeros_like(conditioning.positions[:, :1, 0]))
        hidden = torch.cat(
            (
                self.latent_in(conditioning.current),
                self.latent_in(future_t) + future_time,
                actions[:, :1],
                actions[:, 1:] + action_time,
            ),
            dim=1,
        )
        block = Block(name="generated", hidden=hidden, valid=conditioning.valid, attention="bidirectional")
        output = self.model(conditioning.text, concat_blocks([block]), conditioning.positions, cache)
        start, steps = conditioning.current.shape[1], action_t.shape[1]
        future_v = self.latent_out(output[:, start : start + future_t.shape[1]])
        return future_v, self.action_out(output[:, -steps:], self.config.domain)

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`.

        Future and actions are denoised together. Keys and values of the prompt are computed once; each step runs the generated
        tokens with it and, for guidance, with a dropped prompt.
        """
        if self.mode in ("forward_dynamics", "inverse_dynamics"):
            raise UnsupportedError(f"in the mode {self.mode} cosmos_droid is not trained to act")
        batch, _ = self.prepare_batch(batch, acting=True)
        dims, guidance = batch["action_dim_mask"], self.config.guidance
        noise = patchify(batch["latent_noise"]), mask_dims(batch["noise"][:, 0], dims)
        numels = [part[0].numel() for part in noise]
        future_mask = torch.ones_like(noise[1][..., 0], dtype=torch.bool)  # as many frames as steps
        current = self.latents(batch)[:, :1]
        dropped = {**batch, "prompt_mask": torch.zeros_like(batch["prompt_mask"])}
        conditionings = [self.conditioning(prompt, current, future_mask) for prompt in (batch, dropped)[: 1 + (guidance != 1)]]
        caches = [self.model.prefill(conditioning.text) for conditioning in conditionings]
        no_condition = future_mask.new_zeros(len(dims), 2)

        def velocity(x_t: Tensor, time: Tensor) -> Tensor:
            future_t, action_t = (part.view_as(like) for part, like in zip(x_t.split(numels, dim=1), noise, strict=True))
            velocities = []
            for conditioning, cache in zip(conditionings, caches, strict=True):
                future_v, action_v = self.velocity(conditioning, future_t, action_t, time, no_condition, cache)
                velocities.append(concat_flat((future_v, mask_dims(action_v, dims))))
            prompted, *unprompted = velocities
            return classifier_free_guidance(prompted, unprompted[0], guidance) if unprompted else prompted

        action = denoise(velocity, concat_flat(noise), self.config.denoising_steps)[:, numels[0] :].view_as(noise[1])
        return self.action_normaliser.denormalise(action, batch["dataset_index"])

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:  # noqa: ARG002
        return {"prompt": TokenCount(batch["prompt_tokens"].shape[1], is_trainable(self.model.vocabulary))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        groups, cameras, _, height, width = self.spec.latent_shape
        frame, steps = cameras * height * width // PATCH**2, self.config.horizon
        time = tally.count_linear(self.time_out, 1, tally.count_linear(self.time_in, 1, input_requires_grad=False))
        video = tally.count_linear(self.latent_in, (1 + groups) * frame, input_requires_grad=False)
        action = self._count_action(tally, self.action_in, 1 + steps, input_requires_grad=False)
        action = action or is_trainable(self.action_modality)
        tokens = TokenCount((1 + groups) * frame + 1 + steps, time or video or action)
        _, generated = count_language_action(tally, self.model, blocks["prompt"], tokens, None)  # type: ignore[arg-type]
        tally.count_linear(self.latent_out, groups * frame, generated.requires_grad)
        self._count_action(tally, self.action_out, steps, generated.requires_grad)

    @staticmethod
    def _count_action(tally: FlopTally, layer: DomainLinear, rows: int, input_requires_grad: bool) -> bool:
        return tally.count_lookup_linear(layer.weight, rows, input_requires_grad) or is_trainable(layer.bias)

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
            uniforms=3 if self.mode == "joint" else 2,
            latent_shape=(config.horizon // TEMPORAL_FACTOR, self.cameras, LATENT_CHANNELS, *latent_size),
            state_normalisation=config.normalisation,
            action_normalisation=config.normalisation,
            trimmable=("prompt",),  # not the cameras: their slots are columns of the grid of positions
        )

    def parameter_roles(self) -> dict[str, Role]:
        """Return roles; the tables of domains hold the weights of linear layers, so these have weight decay.

        Domains that do not train therefore decay, as published.
        """
        matrices = ("action_in.weight.weight", "action_out.weight.weight")
        roles = super().parameter_roles()
        return roles | {name: replace(roles[name], decay=True) for name in matrices}

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        super().load_statistics(statistics)
        self.action_normaliser.load([features[ACTION] for features in statistics])


def mask_dims(action: Tensor, dims: Tensor) -> Tensor:
    """Set action dimensions (B, N, A) to 0 that the dataset does not have; `dims` (B, A) is True for those that it has."""
    return torch.where(dims[:, None], action, 0.0)


def concat_flat(parts: tuple[Tensor, ...]) -> Tensor:
    """Flatten each part (B, ...) and concatenate them: (B, K)."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


build = builder(CosmosDroid, CosmosConfig)
