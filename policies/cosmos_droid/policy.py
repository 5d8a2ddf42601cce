"""cosmos_droid: what the cameras will see and what the arm will do, denoised together (NVIDIA's Cosmos 3 Nano, tuned on DROID).

The video tokenizer is a stand-in, see `latents.encode`; `CosmosDroid.latents` is where those of another would come in. The
published 16 B count a vision tower and a head for text as well: neither has a part in a training step.
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
from .latents import CHANNELS, PATCH, SPACE, TIME, TOKEN, encode, grid, patches
from .mixture import Mixture, MixtureLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from benchbox.registry.contracts import Axes, Batch

    from .._layers.families.vision_language import KVCache

Side = Annotated[int, Field(gt=0, multiple_of=SPACE * PATCH)]
Task = Literal["policy", "forward_dynamics", "inverse_dynamics"]

TASKS: tuple[Task, ...] = ("policy", "forward_dynamics", "inverse_dynamics")
LOSS_WEIGHT = 10.0  # of either term
MARGIN = 15_000  # positions between the text and what is generated
BASE_FPS = 24  # at this rate a latent frame is one position long
TIME_CHANNELS = 256


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class CosmosConfig:
    """A preset: the sizes of a stream, of what is read and of what is generated.

    In the mode `policy` the future and the actions are denoised, in `forward_dynamics` the future, given the actions, in
    `inverse_dynamics` the actions, given the future; `joint` is one of these for every sample, by chance.
    """

    model: DecoderConfig
    vocabulary: PositiveInt
    image: tuple[Side, Side]  # height and width, in pixels
    horizon: Annotated[int, Field(gt=0, multiple_of=TIME)]  # steps, and frames after the current one
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    mode: Task | Literal["joint"] = "policy"
    fps: PositiveInt = 15
    denoising_steps: PositiveInt = 10

    @property
    def state_dim(self) -> int:
        """A state is embedded as an action: both are positions of joints."""
        return self.action_dim


class Known(NamedTuple):
    """What is not denoised in any mode, and how all tokens lie."""

    text: TokenSequence
    current: Tensor  # (B, V, 192): the current frame
    state: Tensor  # (B, 1, A), normalised
    valid: Tensor  # (B, S) bool, of current frame, future, state and actions
    places: Tensor  # (B, S, 3) int64, likewise


class CosmosDroid(PrefixPolicy):
    """One stream reads the prompt, causally. The other generates: the current frame, the future, the state and the actions see
    one another and the prompt. Future and actions share a time. As published, its embedding is added to their tokens; what is
    given has time 0, where published it has none.
    """

    reads_state: ClassVar[bool] = True
    model: Mixture  # type: ignore[assignment]  # has the layers of a vision-language-action model, and no tower
    config: CosmosConfig

    def __init__(self, config: CosmosConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        width = config.model.width
        self.stretch = TIME * config.fps  # a position in parts, so that each frame is a whole number of them: BASE_FPS long
        self.model = Mixture(config.model, config.vocabulary, axes, stretch=self.stretch)
        self.latent_in = Linear(TOKEN, width)
        self.latent_out = Linear(width, TOKEN)
        self.action_in = Linear(config.action_dim, width)
        self.action_out = Linear(width, config.action_dim)
        self.time_in = Linear(TIME_CHANNELS, width)
        self.time_out = Linear(width, width)
        self.action_normaliser = Normaliser(config.action_dim, self.spec.action_normalisation)

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """What is given to a sample counts nothing: its sum and number are 0."""
        if act:
            return self.select_actions(batch)
        batch, _ = self.prepare_batch(batch)
        latents = self.latents(batch)
        known = self.known(batch, latents[:, :1], batch["future_mask"])
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        given = self.given(batch["uniform"])
        times = torch.where(given, 0.0, logit_normal(batch["uniform"][:, :1]))  # (B, 2)
        future, change = interpolate(patches(latents[:, 1:]), patches(batch["latent_noise"].float()), times[:, 0])
        action, action_change = interpolate(action, batch["noise"][:, 0].float(), times[:, 1])

        predicted, predicted_action = self.velocity(known, future, action, times)

        start, number = known.current.shape[1], future.shape[1]
        missing = ~known.valid[:, start : start + number] | given[:, :1]
        every = torch.ones_like(change[:, 0], dtype=torch.bool)
        done = batch["action_is_pad"] | given[:, 1:]
        terms = {
            "vision": flow_loss(predicted, change, missing, every),
            "action": flow_loss(predicted_action, action_change, done, batch["action_dim_mask"]),
        }
        return combine_losses({name: (LOSS_WEIGHT * error, count) for name, (error, count) in terms.items()}, per_sample=per_sample)

    def latents(self, batch: Batch) -> Tensor:
        """Of the current frame, and of the future where the batch has it: (B, G, C, 48, h, w) float32, about of unit size."""
        now = batch["images"][:, -1:]
        return encode(torch.cat((now, batch["future_images"]), dim=1) if "future_images" in batch else now)

    def known(self, batch: Batch, current: Tensor, real: Tensor) -> Known:
        """What is not denoised.

        Args:
            batch: what is known before acting.
            current: (B, 1, C, 48, h, w), the latents of the current frame.
            real: (B, F) bool, which frames of the future there are. A latent is there if all of its frames are.
        """
        text = concat_blocks([self.text("prompt", batch, "causal")])
        rows, columns = (side // (SPACE * PATCH) for side in self.config.image)
        frames = F.pad(real.unflatten(1, (-1, TIME)).all(dim=2), (1, 0), value=True)  # (B, G)
        video = (frames[:, :, None] & batch["image_mask"][:, -1:]).flatten(1).repeat_interleave(rows * columns, dim=1)
        steps = torch.arange(1 + self.config.horizon, device=real.device)  # of the state and the actions that follow it
        arm = F.pad(steps[:, None], (0, 2))
        time, row, column = torch.cat((grid((frames.shape[1], self.cameras, rows, columns), real.device), arm)).unbind(dim=1)
        begin = self.stretch * (text.readable.sum(dim=1, keepdim=True) + MARGIN)
        axes = begin + BASE_FPS * time, self.stretch * row, self.stretch * column
        return Known(
            text=text,
            current=patches(current),
            state=self.states(batch)[:, -1:],
            valid=F.pad(video, (0, len(steps)), value=True),
            places=torch.stack(torch.broadcast_tensors(*axes), dim=-1),
        )

    def given(self, uniform: Tensor) -> Tensor:
        """Whether future and actions are given: (B, 2) bool. In the mode `joint` the last number of (B, U) decides."""
        if self.config.mode == "joint":
            task = (uniform[:, -1] * len(TASKS)).long()
        else:
            task = torch.full_like(uniform[:, -1], TASKS.index(self.config.mode)).long()
        return torch.stack((task == TASKS.index("inverse_dynamics"), task == TASKS.index("forward_dynamics")), dim=1)

    def velocity(
        self, known: Known, future: Tensor, action: Tensor, times: Tensor, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of the future (B, M, 192) and the actions (B, N, A), which are at `times` (B, 2)."""
        moments = embed_time(F.pad(times, (1, 0)).flatten(), TIME_CHANNELS)
        moments = self.time_out(F.silu(self.time_in(moments))).unflatten(0, (-1, 3))
        now, ahead, arm = moments.split(1, dim=1)
        hidden = torch.cat(
            (
                self.latent_in(known.current) + now,
                self.latent_in(future) + ahead,
                self.action_in(known.state) + now,
                self.action_in(action) + arm,
            ),
            dim=1,
        )
        tokens = concat_blocks([Block(name="generated", hidden=hidden, valid=known.valid, attention="bidirectional")])
        generated = self.model(known.text, tokens, known.places, cache)
        start, steps = known.current.shape[1], action.shape[1]
        return self.latent_out(generated[:, start : start + future.shape[1]]), self.action_out(generated[:, -steps:])

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`. The prompt is read once; future and actions are denoised together."""
        if self.config.mode in ("forward_dynamics", "inverse_dynamics"):
            raise UnsupportedError(f"in the mode {self.config.mode} cosmos_droid is not trained to act")
        batch, _ = self.prepare_batch(batch, acting=True)
        noise = patches(batch["latent_noise"]), batch["noise"][:, 0]
        everything = torch.ones_like(noise[1][..., 0], dtype=torch.bool)  # as many frames as steps
        known = self.known(batch, self.latents(batch)[:, :1], everything)
        cache = self.model.read(known.text)
        sizes = [part[0].numel() for part in noise]

        def velocity(point: Tensor, time: Tensor) -> Tensor:
            future, action = (part.view_as(like) for part, like in zip(point.split(sizes, dim=1), noise, strict=True))
            return flat(self.velocity(known, future, action, time[:, None].expand(-1, 2), cache))

        action = denoise(velocity, flat(noise), self.config.denoising_steps)[:, sizes[0] :].view_as(noise[1])
        return self.action_normaliser.denormalise(action, batch["dataset_index"])

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:  # noqa: ARG002
        return {"prompt": TokenCount(batch["prompt_tokens"].shape[1], is_trainable(self.model.vocabulary))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        groups, cameras, _, height, width = self.spec.latent_shape
        frame, steps = cameras * height * width // PATCH**2, self.config.horizon
        moments = tally.through(self.time_out, 3, tally.through(self.time_in, 3, below=False))
        video = tally.through(self.latent_in, (1 + groups) * frame, below=False)
        arm = tally.through(self.action_in, 1 + steps, below=False)
        tokens = TokenCount((1 + groups) * frame + 1 + steps, moments or video or arm)
        _, generated = count_language_action(tally, self.model, blocks["prompt"], tokens, None)  # type: ignore[arg-type]
        tally.through(self.latent_out, groups * frame, generated.below)
        tally.through(self.action_out, steps, generated.below)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (MixtureLayer,)

    def batch_spec(self) -> BatchSpec:
        config = self.config
        height, width = config.image
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
            latent_shape=(config.horizon // TIME, self.cameras, CHANNELS, height // SPACE, width // SPACE),
            state_normalisation="mean_std",
        )

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        super().load_statistics(statistics)
        self.action_normaliser.load([features[ACTION] for features in statistics])


def logit_normal(uniform: Tensor) -> Tensor:
    """Times whose log-odds are standard normal, by inverse distribution function (arXiv:2403.03206). float32."""
    return torch.special.ndtri(uniform.float()).sigmoid()


def flat(parts: tuple[Tensor, ...]) -> Tensor:
    """(B, ...) each, side by side: (B, K)."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


build = builder(CosmosDroid, CosmosConfig)
