"""pi0, pi05 and pi0-FAST of lerobot 0.6 with random weights, in their published size or in others.

lerobot takes most sizes from a table in its code, and some are written into its constructors. A preset with sizes replaces,
while the policy is built, the function that reads the table and the two model classes, whose configurations then get the other
sizes. Everything else is lerobot's code, and the names of its state dict are those of its checkpoints.

Noise and time, which lerobot draws in every step, come with the batch. The loss is lerobot's, of actions after the end of an
episode too. A camera that a sample lacks is masked for this sample; lerobot masks it for the whole batch.

lerobot computes a layer of the backbone and its expert together, from their parts, and never calls the layers of pi0 and pi05.
Sharding and checkpointing are therefore at the multilayer perceptrons, which have nine tenths of their weights, and at the
layers of the vision tower.

pi0-FAST is trained on FAST tokens without the texts "Action: " before and "|" behind them, and does not act: both take
PaliGemma's tokenizer, which is on the model hub.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

import benchbox
from benchbox.errors import UnsupportedError

from .features import (
    ACTION,
    ACTION_DIM_MASK,
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
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, Policy

NAMES = {"pi0": "PI0", "pi05": "PI05", "pi0_fast": "PI0Fast"}

_UNITS = ("GemmaMLP", "SiglipEncoderLayer")  # of pi0 and pi05
_VOCABULARY = 257152  # of PaliGemma, written into lerobot's constructors
_ACTION_TOKENS, _ACTION_TOKEN_MASK = "action.tokens", "action.token_mask"


def build_pi(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:
    """Build pi0, pi05 or pi0-FAST in float32 on torch's default device.

    Raises:
        UnsupportedError: this version of lerobot asks for a transformers that is not on PyPI.
    """
    import_lerobot("lerobot.policies")
    if find_spec("lerobot.policies.pi_gemma") is None:
        raise UnsupportedError(
            f"lerobot:{source} needs lerobot 0.6: the installed one asks for a patched transformers, which is not on PyPI"
        )
    features = Features(cameras=axes.cams, pixels=preset["pixels"], dims=preset["dims"])
    sides, dims = (features.pixels, features.pixels), {"max_state_dim": features.dims, "max_action_dim": features.dims}
    config = features.config(source, NAMES[source], image_resolution=sides, **dims, **preset["config"])
    modeling = import_lerobot(f"lerobot.policies.{source}.modeling_{source}")
    policy_class = getattr(modeling, f"{NAMES[source]}Policy")
    sizes = preset.get("sizes")
    vocabulary = sizes["vocabulary"] if sizes else _VOCABULARY
    tokens = {"prompt_tokens": config.tokenizer_max_length}
    if source == "pi0_fast":
        tokens["fast_tokens"] = config.max_action_tokens - 1  # before them stands the beginning of a sequence
    spec = features.spec(config, text_vocab=vocabulary, **tokens, **preset.get("batch", {}))
    with _other_sizes(modeling, sizes, features.pixels):
        if source != "pi0_fast":
            policy = _flow_policy(policy_class)(config)
            inputs = features.flow_inputs
            return benchbox.adapt(policy, loss=_loss, batch=inputs, spec=spec, units=_UNITS, act=features.act_by_flow)
        with replaced(modeling, AutoProcessor=_NoTokenizer, AutoTokenizer=_NoTokenizer):
            policy = _token_policy(policy_class)(config)
    for layer in policy.model.paligemma_with_expert.paligemma.model.language_model.layers:
        layer.register_forward_pre_hook(_cast_inputs_of_layer, with_kwargs=True)
    inputs = partial(_token_inputs, features, first_token=vocabulary - 1 - config.fast_skip_tokens)
    return benchbox.adapt(policy, loss=_loss, batch=inputs, spec=spec)


def _loss(loss: Tensor) -> Tensor:
    return loss


@contextmanager
def _other_sizes(modeling: Any, sizes: Mapping[str, Any] | None, pixels: int) -> Iterator[None]:
    """Let a module of lerobot build other sizes than the published ones within the with block; without sizes, the latter.

    Args:
        sizes: `backbone` and `expert` under the names of lerobot's `GemmaConfig`, `vision` under those of the configuration of
            SigLIP in transformers, and `vocabulary`.
    """
    if sizes is None:
        yield
        return
    by_name = {"gemma_2b": sizes["backbone"], "gemma_300m": sizes["backbone"] | sizes.get("expert", {})}
    substitutes: dict[str, Any] = {"get_gemma_config": lambda name: modeling.GemmaConfig(**by_name[name])}
    paligemma = modeling.PaliGemmaForConditionalGenerationWithPiGemma

    def build_paligemma(config: Any) -> Any:
        vision = sizes["vision"] | {"image_size": pixels, "projection_dim": sizes["backbone"]["width"]}
        for name, size in vision.items():
            setattr(config.vision_config, name, size)
        config.text_config.vocab_size = sizes["vocabulary"]
        return paligemma(config=config)

    substitutes["PaliGemmaForConditionalGenerationWithPiGemma"] = build_paligemma
    if hasattr(modeling, "PiGemmaForCausalLM"):  # pi0-FAST has no expert
        expert = modeling.PiGemmaForCausalLM

        def build_expert(config: Any) -> Any:
            config.vocab_size = sizes["vocabulary"]
            return expert(config=config)

        substitutes["PiGemmaForCausalLM"] = build_expert
    with replaced(modeling, **substitutes):
        yield


def _flow_policy(policy_class: Any) -> Any:
    """Return a subclass of lerobot's pi0 or pi05 that takes noise, time and masks from the batch."""

    class TrainedPi(policy_class):
        def _preprocess_images(self, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
            """Return images and their masks, in training and in acting."""
            images, masks = super()._preprocess_images(batch)
            return images, masks_of_images(batch, masks)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            """Return the loss of every sample (B,)."""
            inputs = [*self._preprocess_images(batch), batch[TOKENS], batch[TOKEN_MASK]]
            if self.name == "pi0":
                inputs.append(self.prepare_state(batch))
            elements = self.model.forward(*inputs, batch[ACTION], batch[NOISE], batch[TIME])  # (B, N, A)
            return mean_of_elements(elements, batch[ACTION_DIM_MASK][:, None])

    TrainedPi.__name__ = policy_class.__name__
    return TrainedPi


def _token_policy(policy_class: Any) -> Any:
    """Return a subclass of lerobot's pi0-FAST that trains with the image masks of the batch."""

    class TrainedPiFast(policy_class):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            """Return the mean loss of all FAST tokens, a scalar."""
            images, masks = self._preprocess_images(batch)
            tokens = (batch[TOKENS], batch[TOKEN_MASK], batch[_ACTION_TOKENS], batch[_ACTION_TOKEN_MASK])
            loss: Tensor = self.model.forward(images, masks_of_images(batch, masks), *tokens)["loss"]
            return loss

    TrainedPiFast.__name__ = policy_class.__name__
    return TrainedPiFast


def _cast_inputs_of_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast hidden states and rotary embeddings to the dtype that the weights of a layer are computed in.

    lerobot casts hidden states for all layers at once, by the dtype of the first layer before it is called. That is float32
    where FSDP gathers in bfloat16, and rotated queries are then of another dtype than values.
    """
    dtype = layer.self_attn.q_proj.weight.dtype
    rotary = {"position_embeddings": tuple(part.to(dtype) for part in kwargs["position_embeddings"])}
    return (args[0].to(dtype), *args[1:]), kwargs | rotary


class _NoTokenizer:
    """In the place of two classes of transformers, which would load tokenizers from the model hub."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""


def _token_inputs(features: Features, batch: Batch, *, first_token: int) -> tuple[dict[str, Any]]:
    """Return a batch of lerobot's pi0-FAST.

    lerobot predicts each token of the actions but the first one, which is the `<bos>` that a prompt begins with as well.

    Args:
        first_token: FAST token 0 among those of PaliGemma; token n is n below it.
    """
    beginning, fast_mask = batch["prompt_tokens"][:, :1], batch["fast_mask"]
    tokens = {
        _ACTION_TOKENS: torch.cat([beginning, first_token - batch["fast_tokens"]], dim=1),
        _ACTION_TOKEN_MASK: torch.cat([torch.ones_like(beginning, dtype=torch.bool), fast_mask], dim=1),
    }
    return (features.language_inputs(batch) | tokens,)
