"""Policies with an action expert trained by flow matching: the pi family."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser
from benchbox.errors import ConfigurationError, Problem

from ..cost.flops import FlopTally, TokenCount, concat_counts, count_language_action, is_trainable
from ..nn.discrete import DiscreteActions
from ..nn.precision import Linear
from ..nn.siglip import SiglipLayer
from ..nn.units import LayerPair
from ..presets import FORBID_EXTRA
from ..sequence.token_sequence import Block, TokenSequence, concat_blocks
from .flow import TimeCondition, denoise, flow_loss, interpolate, time_from_uniform
from .generation import RESPONSE, generate_response
from .losses import combine_losses, text_losses
from .prefix_policy import ACTION, PrefixConfig, PrefixPolicy
from .vision_language import VisionLanguageAction, VisionLanguageActionConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class FlowConfig(PrefixConfig):
    """Configuration of a policy with an action expert. Without FAST tokens the backbone is not trained on actions."""

    model: VisionLanguageActionConfig
    fast_tokens: NonNegativeInt = 0
    fast_vocab: PositiveInt = 2048
    denoising_steps: PositiveInt = 10
    knowledge_insulation: bool = True


class FlowPolicy(PrefixPolicy):
    """A `PrefixPolicy` with an action expert, trained by flow matching, and FAST tokens, which train its backbone."""

    predicted: ClassVar[tuple[str, ...]] = ("response",)
    fast_cue: ClassVar[str] = "Action: "  # before the FAST tokens; the expert must not attend to it
    adaptive: ClassVar[bool] = True  # the expert's norms are conditioned on time (adaRMS)
    model: VisionLanguageAction

    def __init__(self, config: FlowConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        predicts_text = bool(self.predicted_texts) or config.fast_tokens > 0
        if config.knowledge_insulation and not predicts_text:
            problem = "keeps the flow loss from the backbone, which has no other: it would learn nothing"
            raise ConfigurationError(Problem("preset.knowledge_insulation", problem, "set it to false, or give fast_tokens"))
        self.model = VisionLanguageAction(
            config.model,
            axes,
            insulated=config.knowledge_insulation,
            adaptive=self.adaptive,
            predicts_text=predicts_text,
        )
        self.discrete = DiscreteActions(config.fast_vocab, config.model.backbone.width) if config.fast_tokens else None
        width = config.model.expert.width
        self.action_in = Linear(config.action_dim, width)
        self.action_out = Linear(width, config.action_dim)
        self.time = TimeCondition(width) if self.adaptive else None
        self.action_normaliser = Normaliser(config.action_dim, self.spec.action_normalisation)

    def suffix(self, batch: Batch, x_t: Tensor, time: Tensor) -> tuple[TokenSequence, Tensor | None]:  # noqa: ARG002
        """Return the expert's tokens, actions last, and the condition of its norms.

        Args:
            batch: for inputs other than the actions.
            x_t: (B, N, A), noisy actions.
            time: (B,).
        """
        assert self.time is not None
        return concat_blocks([unpadded_block("actions", self.action_in(x_t))]), self.time(time)

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        prefix = concat_blocks([*self.blocks(batch, present), *self._discrete_blocks(batch, present)])
        action = self.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        time = time_from_uniform(batch["uniform"][:, 0])
        x_t, u_t = interpolate(action, batch["noise"][:, 0].float(), time)

        hidden, expert_hidden = self.model(prefix, *self.suffix(batch, x_t, time))

        v_t = self.action_out(expert_hidden[:, -self.config.horizon :])
        terms = {"flow": flow_loss(v_t, u_t, batch["action_is_pad"], batch["action_dim_mask"])}
        terms |= text_losses(prefix, self.predicted_texts, partial(self.token_losses, sequence=prefix, hidden=hidden))
        losses = combine_losses(terms, per_sample=per_sample)
        if self.discrete is not None:
            # The backbone is never trained on truncated tokens, so every step reports their number.
            losses.parts["fast_truncated"] = batch["fast_truncated"].float().mean()
        return losses

    def generate_response(self, batch: Batch, end: Tensor) -> Batch:
        """See `benchbox.registry.contracts.RespondingPolicy`."""
        return generate_response(self, batch, end)

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`. The prefix is computed once; each denoising step runs the expert alone.

        The expert is not trained on the velocity of dimensions that the dataset lacks. It sees them as in training: on their
        way from noise to 0.
        """
        batch, present = self.prepare_batch(batch, acting=True)
        prefix = concat_blocks(self.blocks(batch, present))
        cache = self.model.prefill(prefix)
        noise, dims = batch["noise"][:, 0].float(), batch["action_dim_mask"][:, None]

        def velocity(x_t: Tensor, time: Tensor) -> Tensor:
            suffix, condition = self.suffix(batch, x_t, time)
            expert_hidden = self.model.forward_suffix(prefix, cache, suffix, condition)
            return torch.where(dims, self.action_out(expert_hidden[:, -self.config.horizon :]), noise)

        action = denoise(velocity, noise, self.config.denoising_steps)
        return self.action_normaliser.denormalise(action, batch["dataset_index"])

    def _discrete_blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        """Return the cue and the FAST tokens, to which the expert must not attend: neither is there when the policy acts."""
        if self.discrete is None:
            return []
        cue = self.cue("action", batch, present) if self.fast_cue else []
        tokens = batch["fast_tokens"]
        fast = Block(name="fast", hidden=self.discrete(tokens), valid=batch["fast_mask"], attention="causal", targets=tokens)
        return [replace(block, visible_to_suffix=False) for block in (*cue, fast)]

    def token_head(self, name: str) -> nn.Module:
        return self.discrete if name == "fast" and self.discrete is not None else super().token_head(name)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        blocks = super().count_blocks(tally, batch, present)
        if self.discrete is not None:
            blocks["fast"] = TokenCount(batch["fast_tokens"].shape[1], is_trainable(self.discrete.embedding))
        return blocks

    def count_suffix(self, tally: FlopTally) -> tuple[TokenCount, bool | None]:
        """Count `suffix`: its tokens, and whether the condition requires a gradient."""
        assert self.time is not None
        requires_grad = tally.count_linear(self.action_in, self.config.horizon, input_requires_grad=False)
        inner = tally.count_linear(self.time.inner, 1, input_requires_grad=False)
        return TokenCount(self.config.horizon, requires_grad), tally.count_linear(self.time.outer, 1, inner)

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        prefix = concat_counts(blocks)
        hidden, expert_hidden = count_language_action(tally, self.model, prefix, *self.count_suffix(tally))
        tally.count_linear(self.action_out, self.config.horizon, expert_hidden.requires_grad)
        self.count_token_losses(tally, blocks, hidden)

    def count_token_losses(self, tally: FlopTally, blocks: dict[str, TokenCount], hidden: TokenCount) -> None:
        super().count_token_losses(tally, blocks, hidden)
        if self.discrete is not None:
            input_requires_grad = hidden.requires_grad or is_trainable(self.model.norm)
            tally.count_linear(self.discrete.head, blocks["fast"].number, input_requires_grad)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return SiglipLayer, LayerPair

    def batch_spec(self) -> BatchSpec:
        fast = self.config.fast_tokens
        cues = {"action": self.fast_cue} if fast and self.fast_cue else {}
        return replace(
            super().batch_spec(),
            fast_tokens=fast,
            fast_vocab=self.config.fast_vocab,
            cues=cues,
            response_generated=self.config.response_tokens > 0 and RESPONSE in self.predicted,
        )

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        super().load_statistics(statistics)
        self.action_normaliser.load([features[ACTION] for features in statistics])


def unpadded_block(name: str, hidden: Tensor) -> Block:
    """Return a bidirectional block without padding."""
    return Block(name=name, hidden=hidden, valid=hidden.new_ones(hidden.shape[:2], dtype=torch.bool), attention="bidirectional")
