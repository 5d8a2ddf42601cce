"""pi05: state as text; actions as FAST tokens, which teach the backbone, and as a flow, which teaches the expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser
from benchbox.registry.contracts import Axes, BatchSpec, Losses, Role

from .._layers.discrete import DiscreteActions
from .._layers.flow import TimeCondition, flow_loss, mix, time_from_uniform
from .._layers.losses import combine, token_loss
from .._layers.pair import LayerPair
from .._layers.paligemma import PaliGemma, PaliGemmaConfig
from .._layers.precision import Linear
from .._layers.prefix import Block, Prefix, lay, select
from .._layers.presets import CLOSED, read
from .._layers.roles import roles
from .._layers.siglip import SiglipLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Batch


@dataclass(config=CLOSED, frozen=True, slots=True, kw_only=True)
class Pi05Config:
    """A preset: the model, and the sizes of what it reads and predicts."""

    model: PaliGemmaConfig
    horizon: PositiveInt
    state_dim: PositiveInt
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    fast_tokens: PositiveInt
    fast_vocab: PositiveInt
    knowledge_insulation: bool = True


class Pi05(nn.Module):
    """See `benchbox.registry.contracts.Policy`."""

    def __init__(self, config: Pi05Config, axes: Axes) -> None:
        super().__init__()
        self.config, self.cameras = config, axes.cams
        self.paligemma = PaliGemma(config.model, axes, insulated=config.knowledge_insulation)
        self.discrete = DiscreteActions(config.fast_vocab, config.model.backbone.width)
        self.action_in = Linear(config.action_dim, config.model.expert.width)
        self.action_out = Linear(config.model.expert.width, config.action_dim)
        self.time = TimeCondition(config.model.expert.width)
        self.action_normaliser = Normaliser(config.action_dim, self.batch_spec().action_normalisation)

    def forward(self, batch: Batch, *, per_sample: bool = False) -> Losses:
        prefix = self.prefix(batch)
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        time = time_from_uniform(batch["uniform"][:, 0])
        noisy, velocity = mix(action, batch["noise"].float(), time)

        hidden, suffix = self.paligemma(prefix, self.action_in(noisy), self.time(time))

        predicted = self.action_out(suffix)
        response = self.paligemma.vocabulary(self.predicting(prefix, hidden, "response"), scores=True)
        fast = self.discrete.score(self.predicting(prefix, hidden, "fast"))
        terms = {
            "flow": flow_loss(predicted, velocity, batch["action_is_pad"], batch["action_dim_mask"]),
            "fast": token_loss(fast, batch["fast_tokens"], batch["fast_mask"]),
            "response": token_loss(response, batch["response_tokens"], batch["response_mask"]),
        }
        losses = combine(terms, per_sample=per_sample)
        # Tokens that did not fit are actions the backbone is never taught: said in every step's metrics.
        losses.parts["fast_truncated"] = batch["fast_truncated"].float().mean()
        return losses

    def prefix(self, batch: Batch) -> Prefix:
        """What the expert is told, and then the discrete actions, which it must not read."""
        model, fast = self.paligemma, self.discrete.embed(batch["fast_tokens"])
        return lay(
            [
                model.images(batch["images"][:, -1], batch["image_mask"][:, -1]),
                model.text("prompt", batch["prompt_tokens"], batch["prompt_mask"], "continue"),
                model.text("response", batch["response_tokens"], batch["response_mask"], "causal"),
                Block(name="fast", hidden=fast, valid=batch["fast_mask"], attention="causal", readable=False),
            ]
        )

    def predicting(self, prefix: Prefix, hidden: Tensor, block: str) -> Tensor:
        """The normed hidden states (B, L, W) from which the tokens of a block are predicted."""
        return self.paligemma.backbone_norm(select(hidden, prefix.predictors(block)))

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return SiglipLayer, LayerPair

    def batch_spec(self) -> BatchSpec:
        config = self.config
        return BatchSpec(
            cameras=self.cameras,
            image_size=(config.model.vision.image, config.model.vision.image),
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            horizon=config.horizon,
            prompt_tokens=config.prompt_tokens,
            text_vocab=config.model.vocabulary,
            state_in_prompt=True,
            response_tokens=config.response_tokens,
            fast_tokens=config.fast_tokens,
            fast_vocab=config.fast_vocab,
        )

    def parameter_roles(self) -> dict[str, Role]:
        """PaliGemma itself is the backbone; the expert, the action and time projections and the FAST tables are the head."""
        return roles(self, head=lambda name: ".expert" in name or not name.startswith("paligemma."))

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        self.action_normaliser.load([features["action"] for features in statistics])


def build(preset: Mapping[str, Any], axes: Axes) -> Pi05:
    """The policy of a preset, in float32 on torch's default device.

    Raises:
        ConfigurationError: the preset is not one.
    """
    return Pi05(read(Pi05Config, preset), axes)
