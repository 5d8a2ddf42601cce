"""Formulas of openpi's pi0 and pi05, which are on no package index: the network, the flow, the prompt and the processing.

Written from the papers (pi0, arXiv:2410.24164; pi05, arXiv:2504.16054; PaliGemma, arXiv:2407.07726) and from facts about
openpi's repository (`models/pi0.py`, `models/tokenizer.py`, `transforms.py`, the image tools of `openpi-client`): constants,
the order of operations, and the names of tensors in its PyTorch checkpoints, by which the network below reads its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import beta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

NORM_EPS = 1e-6
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"  # also the text embedding


@dataclass(frozen=True)
class Inputs:
    """Inputs of a batch.

    images: (B, C, 3, H, W), from -1 to 1; image_mask: (B, C); tokens, token_mask: (B, L); state: (B, S), or None for pi05.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor | None


@dataclass(frozen=True)
class Network:
    """pi0, or pi05 if the inputs have no state, as a function of its published weights."""

    weights: Mapping[str, Tensor]
    vision_heads: int
    heads: int
    patch: int

    def velocity(self, inputs: Inputs, x_t: Tensor, time: Tensor) -> Tensor:
        """Return v_t (B, N, A) of noisy actions x_t (B, N, A) at the times (B,)."""
        images = [self._vision(image) for image in inputs.images.unbind(1)]
        embedding = self.weights[HEAD]
        text = embedding[inputs.tokens] * embedding.shape[1] ** 0.5
        prefix = torch.cat([*images, text], dim=1)
        patches = images[0].shape[1]
        prefix_valid = torch.cat([inputs.image_mask.repeat_interleave(patches, dim=1), inputs.token_mask], dim=1)
        suffix, condition = self._suffix(inputs.state, x_t, time)
        actions = x_t.shape[1]
        starts_group = torch.zeros(prefix.shape[1] + suffix.shape[1], dtype=torch.long)
        starts_group[prefix.shape[1]] = starts_group[-actions] = 1  # the state, or the first action
        valid = torch.cat([prefix_valid, torch.ones(suffix.shape[:2], dtype=torch.bool)], dim=1)
        mask, positions = attention_mask(valid, starts_group), valid.long().cumsum(dim=1) - 1
        hidden = (prefix, suffix)
        layer = 0
        while f"{EXPERT}.layers.{layer}.self_attn.q_proj.weight" in self.weights:
            hidden = self._layer(layer, hidden, mask, positions, condition)
            layer += 1
        normed, _ = self._norm(f"{EXPERT}.norm", hidden[1], condition)
        return self._linear("action_out_proj", normed[:, -actions:])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _vision(self, images: Tensor) -> Tensor:
        """SigLIP (arXiv:2303.15343) and the projector: (B, 3, H, W) to (B, patches, W)."""
        patch = f"{VISION}.embeddings.patch_embedding"
        x = F.conv2d(images, self.weights[f"{patch}.weight"], self.weights[f"{patch}.bias"], stride=self.patch)
        x = x.flatten(2).mT + self.weights[f"{VISION}.embeddings.position_embedding.weight"]
        layer = 0
        while f"{(name := f'{VISION}.encoder.layers.{layer}')}.layer_norm1.weight" in self.weights:
            normed = self._layer_norm(f"{name}.layer_norm1", x)
            query, key, value = (
                self._linear(f"{name}.self_attn.{part}_proj", normed).unflatten(-1, (self.vision_heads, -1)) for part in "qkv"
            )
            scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
            attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2)
            x = x + self._linear(f"{name}.self_attn.out_proj", attended)
            hidden = F.gelu(self._linear(f"{name}.mlp.fc1", self._layer_norm(f"{name}.layer_norm2", x)), approximate="tanh")
            x = x + self._linear(f"{name}.mlp.fc2", hidden)
            layer += 1
        return self._linear(PROJECTOR, self._layer_norm(f"{VISION}.post_layernorm", x))

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], NORM_EPS)

    def _suffix(self, state: Tensor | None, x_t: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the expert's tokens and the condition of its norms."""
        actions = self._linear("action_in_proj", x_t)
        times = embed_time(time, actions.shape[-1])
        if state is None:
            return actions, F.silu(self._linear("time_mlp_out", F.silu(self._linear("time_mlp_in", times))))
        both = torch.cat([actions, times[:, None].expand_as(actions)], dim=-1)
        actions = self._linear("action_time_mlp_out", F.silu(self._linear("action_time_mlp_in", both)))
        return torch.cat([self._linear("state_proj", state)[:, None], actions], dim=1), None

    def _norm(self, name: str, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """RMS norm, and the gate of the branch behind it: adaptive where the weights have a projection for it."""
        normed = x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        if f"{name}.dense.weight" not in self.weights:
            return normed * (1 + self.weights[f"{name}.weight"]), 1.0
        assert condition is not None
        scale, shift, gate = self._linear(f"{name}.dense", condition)[:, None].chunk(3, dim=-1)
        return normed * (1 + scale) + shift, gate

    def _layer(
        self, layer: int, streams: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor, condition: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend jointly: every stream has its own projections, and queries see the keys of both."""
        names = f"{LANGUAGE}.layers.{layer}", f"{EXPERT}.layers.{layer}"
        gates, projected = [], []
        for name, x in zip(names, streams, strict=True):
            normed, gate = self._norm(f"{name}.input_layernorm", x, condition)
            gates.append(gate)
            projected.append([self._linear(f"{name}.self_attn.{part}_proj", normed) for part in "qkv"])
        query, key, value = (torch.cat(parts, dim=1) for parts in zip(*projected, strict=True))
        width = query.shape[-1] // self.heads
        query, key, value = (tensor.unflatten(-1, (-1, width)) for tensor in (query, key, value))
        query, key = rotate(query, positions) / width**0.5, rotate(key, positions)
        groups = key.shape[2]
        query = query.unflatten(2, (groups, -1))
        scores = torch.einsum("bqghd,bkgd->bghqk", query, key)
        scores = torch.where(mask[:, None, None], scores, -2.3819763e38)
        attended = torch.einsum("bghqk,bkgd->bqghd", scores.softmax(-1), value).flatten(2)
        outputs, start = [], 0
        for name, stream, gate in zip(names, streams, gates, strict=True):
            own = attended[:, start : start + stream.shape[1]]
            start += stream.shape[1]
            x = stream + gate * self._linear(f"{name}.self_attn.o_proj", own)
            normed, mlp_gate = self._norm(f"{name}.post_attention_layernorm", x, condition)
            hidden = F.gelu(self._linear(f"{name}.mlp.gate_proj", normed), approximate="tanh")
            hidden = hidden * self._linear(f"{name}.mlp.up_proj", normed)
            outputs.append(x + mlp_gate * self._linear(f"{name}.mlp.down_proj", hidden))
        return outputs[0], outputs[1]


def attention_mask(valid: Tensor, starts_group: Tensor) -> Tensor:
    """Return (B, P, P) bool: a token sees the valid tokens of its own and of earlier groups."""
    group = starts_group.cumsum(0)
    return (group[None, :] <= group[:, None]) & valid[:, None, :] & valid[:, :, None]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of x (B, P, H, D), whose pairs are (i, i + D/2), with periods up to 1e4."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None].float() / 10_000 ** (torch.arange(half) / half)
    real, imaginary = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)


def embed_time(time: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of periods from 4e-3 to 4 in geometric progression."""
    periods = 4e-3 * 1000 ** (torch.arange(width // 2, dtype=torch.float64) / (width // 2 - 1))
    angles = time.double()[:, None] * (2 * math.pi / periods)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def time_quantile(probability: np.ndarray) -> np.ndarray:
    """Return the time of training that is exceeded with probability 1 - p: t ~ 0.999 Beta(1.5, 1) + 0.001."""
    return beta.ppf(probability, 1.5, 1.0) * 0.999 + 0.001


def sample_actions(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Euler's method from time 1, in float32 like the actions: it ends within half a step of 0."""
    dt = -1.0 / steps
    x_t, time = noise, torch.tensor(1.0)
    while time >= -dt / 2:
        x_t = x_t + dt * velocity(x_t, time.expand(len(noise)))
        time = time + dt
    return x_t


def noisy_actions(action: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Return x_t (B, N, A) at times (B,): the noise at 1, the actions at 0."""
    weight = time.reshape(-1, 1, 1)
    return weight * noise + (1 - weight) * action


def loss_elements(velocity: Tensor, action: Tensor, noise: Tensor) -> Tensor:
    """Squared errors (B, N, A) of the velocity against noise - action. Training averages over all of them."""
    return (velocity - (noise - action)) ** 2


def state_numbers(state: np.ndarray) -> list[int]:
    """Return 256 equal bins over [-1, 1], from 0; -1 below them."""
    return (np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1).tolist()


def clean_task(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")


def prompt_text(task: str, state: np.ndarray | None) -> str:
    """Return the text that is tokenized behind a begin token: of pi0, or of pi05 with a normalised state."""
    if state is None:
        return f"{clean_task(task)}\n"
    return f"Task: {clean_task(task)}, State: {' '.join(map(str, state_numbers(state)))};\nAction: "


def normalise(x: Tensor, statistics: Mapping[str, Tensor], *, quantiles: bool) -> Tensor:
    """Normalise by mean and deviation (pi0), or q01 and q99 to [-1, 1] (pi05)."""
    if not quantiles:
        return (x - statistics["mean"]) / (statistics["std"] + 1e-6)
    return (x - statistics["q01"]) / (statistics["q99"] - statistics["q01"] + 1e-6) * 2 - 1


def denormalise(x: Tensor, statistics: Mapping[str, Tensor], *, quantiles: bool) -> Tensor:
    if not quantiles:
        return x * (statistics["std"] + 1e-6) + statistics["mean"]
    return (x + 1) / 2 * (statistics["q99"] - statistics["q01"] + 1e-6) + statistics["q01"]


def resize_with_pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image (H, W, 3) uint8 with Pillow's bilinear filter, and centre it on black."""
    from PIL import Image

    own_height, own_width = image.shape[:2]
    ratio = max(own_width / width, own_height / height)
    inner_height, inner_width = int(own_height / ratio), int(own_width / ratio)
    resized = np.asarray(Image.fromarray(image).resize((inner_width, inner_height), Image.Resampling.BILINEAR))
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    padded = np.zeros((height, width, 3), dtype=np.uint8)
    padded[top : top + inner_height, left : left + inner_width] = resized
    return padded
