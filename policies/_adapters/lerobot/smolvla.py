"""SmolVLA of lerobot 0.6 with random weights, in its published size or in others.

lerobot reads the configuration of the vision-language model from the model hub, by two classes of transformers, which are
replaced while the policy is built: the configuration is that of the preset, and a processor is not needed, because lerobot
takes two token ids from it for image tokens that are switched off. Everything else is lerobot's code. The vision-language model
is frozen, as lerobot trains SmolVLA by default.

Noise and time, which lerobot draws in every step, come with the batch. The loss of a sample is its mean over the steps before
the end of its episode, as in lerobot for `reduction="none"`, and that of a batch the mean over its samples. lerobot trains with
`reduction="mean"`, which weights samples by the number of these steps.

lerobot computes a layer of the language model and its expert together, from their parts, and never calls the layers. Sharding
and checkpointing are therefore at the multilayer perceptrons and at the layers of the vision tower.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import benchbox
from benchbox.errors import UnsupportedError

from .features import (
    ACTION,
    ACTION_DIM_MASK,
    ACTION_IS_PAD,
    NOISE,
    TIME,
    TOKEN_MASK,
    TOKENS,
    Features,
    import_lerobot,
    masks_of_images,
    mean_of_elements,
    replaced,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Policy

_UNITS = ("LlamaMLP", "SmolVLMEncoderLayer")


def build_smolvla(preset: Mapping[str, Any], axes: Axes) -> Policy:
    """Build SmolVLA in float32 on torch's default device.

    Raises:
        UnsupportedError: its configuration has tokens around images, whose ids lerobot reads from a tokenizer.
    """
    features = Features(cameras=axes.cams, pixels=preset["pixels"], dims=preset["dims"])
    sides, dims = (features.pixels, features.pixels), {"max_state_dim": features.dims, "max_action_dim": features.dims}
    config = features.config("smolvla", "SmolVLA", resize_imgs_with_padding=sides, **dims, **preset["config"])
    if config.add_image_special_tokens:
        raise UnsupportedError(
            "lerobot:smolvla cannot be built here: add_image_special_tokens needs a tokenizer from the model hub"
        )
    modeling = import_lerobot("lerobot.policies.smolvla.modeling_smolvla")
    backbone = import_lerobot("lerobot.policies.smolvla.smolvlm_with_expert")
    sizes = preset["sizes"]
    with replaced(backbone, AutoConfig=_Sizes(sizes), AutoProcessor=_Processor):
        policy = _flow_policy(modeling.SmolVLAPolicy)(config)
    # On the meta device these are tensors outside parameters and buffers. Nothing reads them without image tokens.
    del policy.model.global_image_start_token, policy.model.image_end_token
    spec = features.spec(config, text_vocab=sizes["text_config"]["vocab_size"], prompt_tokens=config.tokenizer_max_length)
    return benchbox.adapt(
        policy, loss=lambda loss: loss, batch=features.flow_inputs, spec=spec, units=_UNITS, act=features.act_by_flow
    )


class _Sizes:
    """In the place of `AutoConfig`: the configuration of a preset."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self._sizes = sizes

    def from_pretrained(self, name: str) -> Any:  # noqa: ARG002 (of a repository)
        """Return the configuration, whatever it is the name of."""
        from transformers import SmolVLMConfig

        return SmolVLMConfig(**self._sizes)


class _Processor:
    """In the place of `AutoProcessor`: a processor that has the token ids which lerobot asks for."""

    @classmethod
    def from_pretrained(cls, name: str) -> Any:  # noqa: ARG003 (of a repository)
        """Return a tokenizer without tokens."""
        return SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))


def _flow_policy(policy_class: Any) -> Any:
    """Return a subclass of lerobot's SmolVLA that takes noise, time and masks from the batch."""

    class TrainedSmolVla(policy_class):
        def prepare_images(self, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
            """Return images and their masks, in training and in acting."""
            images, masks = super().prepare_images(batch)
            return images, masks_of_images(batch, masks)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            """Return the loss of every sample (B,)."""
            inputs = (*self.prepare_images(batch), batch[TOKENS], batch[TOKEN_MASK], self.prepare_state(batch))
            elements = self.model.forward(*inputs, batch[ACTION], batch[NOISE], batch[TIME])  # (B, N, A)
            return mean_of_elements(elements, ~batch[ACTION_IS_PAD][..., None] & batch[ACTION_DIM_MASK][:, None])

    TrainedSmolVla.__name__ = policy_class.__name__
    return TrainedSmolVla
