"""Base class of policies over a vision-language model: a prefix of token blocks, some optional, and texts to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from benchbox.data.normalisation import Normaliser
from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import BatchSpec

from ..cost.flops import FlopTally, TokenCount, concat_counts, count_images, count_language, is_trainable
from ..nn.siglip import SiglipLayer
from ..nn.units import BackboneLayer
from ..presets import FORBID_EXTRA
from ..sequence.presence import agree_on_presence
from ..sequence.token_sequence import Attention, Block, TokenSequence, gather_tokens
from ..weights.export import published_state_dict
from ..weights.published import load_published
from .roles import assign_roles, vision_language_tower
from .vision_language import VisionLanguageConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, Role, Trimmable
    from benchbox.registry.weights import LoadedWeights
    from benchbox.theory.flops import Product

    from .vision_language import VisionLanguage

STATE, ACTION = "observation.state", "action"  # feature names of LeRobot datasets
TEXTS: tuple[Trimmable, ...] = ("prompt", "response", "memory", "metadata")


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """Configuration of a policy over a vision-language model: the model, and the sizes of its inputs."""

    model: VisionLanguageConfig
    horizon: PositiveInt
    state_dim: PositiveInt
    action_dim: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: NonNegativeInt = 0
    history: PositiveInt = 1


class PrefixPolicy(nn.Module):
    """Base class that implements `benchbox.registry.contracts.Policy` for a prefix of token blocks.

    A subclass defines the prefix (`blocks`), which of its blocks may be missing (`optional`) and what it needs of a batch
    (`batch_spec`).
    """

    optional: ClassVar[dict[str, str]] = {}  # name of a block that may be missing: the field that masks it
    announced: ClassVar[dict[str, tuple[str, ...]]] = {}  # name of a cue: the optional blocks it belongs to, if it does
    predicted: ClassVar[tuple[str, ...]] = ()  # texts that the backbone learns to predict
    reads_state: ClassVar[bool] = False  # as numbers; a state in the prompt's text is created by the data pipeline
    model: VisionLanguage

    def __init__(self, config: Any, axes: Axes) -> None:
        super().__init__()
        self.config, self.cameras, self.mode = config, axes.cams, axes.mode
        self.spec = self.batch_spec()
        if self.reads_state:
            self.state_normaliser = Normaliser(config.state_dim, self.spec.state_normalisation)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        """Return the blocks of the prefix in order, with those `optional` blocks that are `present`."""
        raise NotImplementedError

    def drop_inputs(self, batch: Batch) -> Batch:
        """Return the batch without the inputs that this training step drops, decided by its `uniform` numbers."""
        return batch

    def prepare_batch(self, batch: Batch, *, acting: bool = False) -> tuple[Batch, frozenset[str]]:
        """Return the batch after dropping inputs, and the optional blocks that are present on at least one rank.

        Raises:
            DataError: a field is missing on some rank. Raised on every rank if the policy has `optional` blocks.
        """
        fields = self.spec.fields(acting=acting)
        if self.training and not acting and all(field in batch for field in fields):
            batch = self.drop_inputs(batch)
        return batch, agree_on_presence(batch, fields, {name: mask for name, mask in self.optional.items() if mask in fields})

    def text(self, name: str, batch: Batch, attention: Attention) -> Block:
        """Return the block of a text of the batch; a `predicted` text has its tokens as targets."""
        tokens, mask = (batch[f"{name}_{part}"].flatten(1) for part in ("tokens", "mask"))
        return self.model.text(name, tokens, mask, attention, with_targets=name in self.predicted)

    def cue(self, name: str, batch: Batch, present: frozenset[str], attention: Attention = "causal") -> list[Block]:
        """Return the block of a fixed text between other blocks.

        If it belongs to optional blocks (`announced`), samples without any of them have no such text, and without any that is
        `present` there is no block.
        """
        tokens, owners = batch[f"{name}_cue_tokens"], self.announced.get(name)
        if owners is not None and present.isdisjoint(owners):
            return []
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if owners is not None:
            valid = self.samples_with(owners, batch, present)[:, None].expand_as(tokens)
        return [self.model.text(f"{name} cue", tokens, valid, attention)]

    def samples_with(self, names: Sequence[str], batch: Batch, present: frozenset[str]) -> Tensor:
        """Return which samples have one of the optional blocks: (B,) bool."""
        masks = [batch[self.optional[name]].flatten(1).any(dim=1) for name in names if name in present]
        return torch.stack([torch.zeros_like(batch["dataset_index"], dtype=torch.bool), *masks]).any(dim=0)

    def present_cues(self, present: frozenset[str]) -> list[str]:
        """Return the names of the fixed texts that are in the prefix with these optional blocks."""
        return [name for name in self.spec.cues if name not in self.announced or present.intersection(self.announced[name])]

    @property
    def predicted_texts(self) -> tuple[str, ...]:
        """The `predicted` texts that batches have: their number of tokens is not zero."""
        fields = self.spec.fields()
        return tuple(name for name in self.predicted if f"{name}_tokens" in fields)

    def normalised_states(self, batch: Batch) -> Tensor:
        """Return normalised states (B, T, S) float32."""
        return self.state_normaliser.normalise(batch["state"], batch["dataset_index"])

    def token_losses(self, name: str, targets: Tensor, sequence: TokenSequence, hidden: Tensor) -> Tensor:
        """Return the cross-entropies (B, L) float32 of a block's tokens, from the hidden states (B, P, W) of the sequence."""
        return self.token_head(name)(self.model.norm(gather_tokens(hidden, sequence.predictor_indices(name))), targets=targets)

    def token_head(self, name: str) -> nn.Module:  # noqa: ARG002
        """Return the output head of a block's tokens."""
        return self.model.vocabulary

    def work(self, batch: Batch) -> list[Product]:
        """See `benchbox.registry.contracts.Policy`."""
        batch, present = self.prepare_batch(batch)
        tally = FlopTally(self, len(batch["images"]))
        self.count_losses(tally, self.count_blocks(tally, batch, present))
        return tally.products

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        """Count `blocks`: the tokens of each, with one block for every image or text field of the batch spec."""
        _, frames, cameras = batch["images"].shape[:3]
        blocks = {"images": count_images(tally, self.model, cameras, frames)}
        if "subgoal" in present:
            blocks["subgoal"] = count_images(tally, self.model, cameras)
        texts = [name for name in TEXTS if f"{name}_tokens" in batch and (name in present or name not in self.optional)]
        for name in (*texts, *(f"{name}_cue" for name in self.present_cues(present))):
            blocks[name] = TokenCount(batch[f"{name}_tokens"][0].numel(), is_trainable(self.model.vocabulary))
        return blocks

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        """Count the layers and the output heads, from these blocks to the losses."""
        self.count_token_losses(tally, blocks, count_language(tally, self.model, concat_counts(blocks)))

    def count_token_losses(self, tally: FlopTally, blocks: dict[str, TokenCount], hidden: TokenCount) -> None:
        """Count `token_losses` of all predicted blocks."""
        for name in self.predicted:
            if name in blocks:
                input_requires_grad = hidden.requires_grad or is_trainable(self.model.norm)
                tally.count_linear(self.model.vocabulary, blocks[name].number, input_requires_grad, recomputed=True)

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
            trimmable=("cameras", *TEXTS, "fast"),
        )

    def parameter_roles(self) -> dict[str, Role]:
        """Return roles: the vision-language model is the backbone, its expert and everything outside it the head."""
        return assign_roles(self, vision_language_tower)

    def load_weights(self, path: Path) -> LoadedWeights:
        """See `load_published`."""
        return load_published(self, path, predicts_text=bool(self.predicted_texts))

    def published_state_dict(self) -> dict[str, Tensor]:
        """See the function of that name."""
        return published_state_dict(self)

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        if self.reads_state:
            self.state_normaliser.load([features[STATE] for features in statistics])
