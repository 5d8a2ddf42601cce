"""Configuration of cosmos_droid."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from benchbox.registry.contracts import NormalisationMode

from .._layers.nn.decoder import DecoderConfig
from .._layers.presets import FORBID_EXTRA, Probability
from .latents import PATCH, SPATIAL_FACTOR, TEMPORAL_FACTOR

Side = Annotated[int, Field(gt=0, multiple_of=SPATIAL_FACTOR * PATCH)]
Task = Literal["policy", "forward_dynamics", "inverse_dynamics"]

TASKS: tuple[Task, ...] = ("policy", "forward_dynamics", "inverse_dynamics")  # one of them, at random, in the mode joint
DOMAINS, DROID = 32, 8  # embodiments of the published action layers, and the one of DROID and RoboMIND's Franka arms


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class CosmosConfig:
    """Configuration of cosmos_droid."""

    model: DecoderConfig
    vocabulary: PositiveInt
    image: tuple[Side, Side]  # height and width, in pixels
    horizon: Annotated[int, Field(gt=0, multiple_of=TEMPORAL_FACTOR)]  # steps, and frames after the current one
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    fps: PositiveInt = 15
    domain: Annotated[int, Field(ge=0, lt=DOMAINS)] = DROID
    time_shift: PositiveFloat = 5.0  # of 480p; 3 of 256p, 10 of 720p
    caption_drop: Probability = 0.1
    normalisation: NormalisationMode = "identity"  # of state and actions: the joint positions of DROID are not normalised
    denoising_steps: PositiveInt = 10
    guidance: PositiveFloat = 3.0  # of the prompt over a dropped one; 1 is none

    @property
    def state_dim(self) -> int:
        """Size of a state, equal to that of an action, because both are joint positions."""
        return self.action_dim
