"""What policies over a vision-language model share: a prefix of blocks, some of which may be missing, and texts to learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser
from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import BatchSpec

from ..cost.flops import FlopTally, TokenCount, count_images, count_language, concat_counts, is_trainable
from ..nn.siglip import SiglipLayer
from ..nn.units import BackboneLayer
from ..presets import FORBID_EXTRA
from ..sequence.presence import require
from ..sequence.token_sequence import Attention, Block, TokenSequence, select
from ..weights.published import load_published
from .roles import roles, vision_language_tower
from .vision_language import VisionLanguageConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, Role
    from benchbox.registry.weights import Loaded
    from benchbox.theory.flops import Product

    from .vision_language import VisionLanguage

STATE, ACTION = "observation.state", "action"  # as datasets name them
TEXTS = ("prompt", "response", "memory", "metadata")


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """A preset: the model, and the sizes of what it reads."""

    model: VisionLanguageConfig
    horizon: PositiveInt
    state_dim: PositiveInt
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: NonNegativeInt = 0
    history: PositiveInt = 1


class PrefixPolicy(nn.Module):
    """See `benchbox.registry.contracts.Policy`. A policy says what its prefix is made of (`blocks`), what of that may be
    missing (`optional`) and what it needs of a batch (`batch_spec`).
    """

    optional: ClassVar[dict[str, str]] = {}  # a block that may be missing: the field that masks it
    predicted: ClassVar[tuple[str, ...]] = ()  # texts that the backbone learns to say
    reads_state: ClassVar[bool] = False  # as numbers; the text of the prompt is the data's business
    model: VisionLanguage

    def __init__(self, config: Any, axes: Axes) -> None:
        super().__init__()
        self.config, self.cameras = config, axes.cams
        self.spec = self.batch_spec()
        if self.reads_state:
            self.state_normaliser = Normaliser(config.state_dim, self.spec.state_normalisation)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        """What is read, in order; of the `optional` blocks those that are `present`."""
        raise NotImplementedError

    def dropped(self, batch: Batch) -> Batch:
        """The batch without what this step is trained to do without, by its `uniform` numbers."""
        return batch

    def prepare_batch(self, batch: Batch, *, acting: bool = False) -> tuple[Batch, frozenset[str]]:
        """The batch to read, and which optional blocks of it some rank has.

        Raises:
            DataError: a field is missing on some rank; on every rank.
        """
        fields = self.spec.fields(acting=acting)
        if self.training and not acting and all(field in batch for field in fields):
            batch = self.dropped(batch)
        return batch, require(batch, fields, self.optional)

    def text(self, name: str, batch: Batch, attention: Attention) -> Block:
        """The block of a text of the batch; of a `predicted` one each token is learned from what stands before it."""
        tokens, mask = (batch[f"{name}_{part}"].flatten(1) for part in ("tokens", "mask"))
        return self.model.text(name, tokens, mask, attention, learned=name in self.predicted)

    def cue(self, name: str, batch: Batch) -> Block:
        """The block of a fixed text."""
        tokens = batch[f"{name}_cue_tokens"]
        return self.model.text(f"{name} cue", tokens, torch.ones_like(tokens, dtype=torch.bool), "causal")

    def states(self, batch: Batch) -> Tensor:
        """Normalised states (B, T, S) float32."""
        return self.state_normaliser.normalise(batch["state"], batch["dataset_index"])

    def scores(self, name: str, stream: TokenSequence, hidden: Tensor) -> Tensor:
        """Logits (B, L, V) float32 of the tokens of a block, given the hidden states (B, P, W) of the stream."""
        return self.model.vocabulary(self.model.norm(select(hidden, stream.predictor_indices(name))), scores=True)

    def work(self, batch: Batch) -> list[Product]:
        """See `benchbox.registry.contracts.Policy`."""
        batch, present = self.prepare_batch(batch)
        tally = FlopTally(self, len(batch["images"]))
        self.count_losses(tally, self.count_blocks(tally, batch, present))
        return tally.products

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        """What `blocks` costs: the tokens of each, one block for every field of images or text that the spec asks for."""
        _, frames, cameras = batch["images"].shape[:3]
        blocks = {"images": count_images(tally, self.model, cameras, frames)}
        if "subgoal" in present:
            blocks["subgoal"] = count_images(tally, self.model, cameras)
        texts = [name for name in TEXTS if f"{name}_tokens" in batch and (name in present or name not in self.optional)]
        for name in (*texts, *(f"{name}_cue" for name in self.spec.cues)):
            blocks[name] = TokenCount(batch[f"{name}_tokens"][0].numel(), is_trainable(self.model.vocabulary))
        return blocks

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        """What the losses of these blocks cost."""
        self.count_logits(tally, blocks, count_language(tally, self.model, concat_counts(blocks)))

    def count_logits(self, tally: FlopTally, blocks: dict[str, TokenCount], hidden: TokenCount) -> None:
        """What `scores` costs."""
        for name in self.predicted:
            if name in blocks:
                tally.through(self.model.vocabulary, blocks[name].number, hidden.below or is_trainable(self.model.norm))

    def select_actions(self, batch: Batch) -> Tensor:  # noqa: ARG002
        raise UnsupportedError(f"{type(self).__name__} does not act")

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return SiglipLayer, BackboneLayer

    def batch_spec(self) -> BatchSpec:
        config = self.config
        return BatchSpec(
            cameras=self.cameras,
            image_size=(config.model.vision.image, config.model.vision.image),
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            horizon=config.horizon,
            history=config.history,
            prompt_tokens=config.prompt_tokens,
            text_vocab=config.model.vocabulary,
            response_tokens=config.response_tokens,
        )

    def parameter_roles(self) -> dict[str, Role]:
        """The vision-language model is the backbone; an expert in it, and what stands beside it, is the head."""
        return roles(self, vision_language_tower)

    def load_weights(self, path: Path) -> Loaded:
        """See `load_published`."""
        return load_published(self, path)

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        if self.reads_state:
            self.state_normaliser.load([features[STATE] for features in statistics])
