"""Formulas of Cosmos 3 as it is fine-tuned on DROID: times, flow, action layers, mixture of transformers, losses.

Written from the facts of NVIDIA/cosmos-framework and the papers that it builds on. As there, a sample is a sequence without
padding. Parameters have its names, those of generated tokens the suffix `_moe_gen`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Weights = Mapping[str, Tensor]

MARGIN, BASE_FPS, TEMPORAL_FACTOR = 15_000, 24, 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the transformer, and the rate of the frames."""

    depth: int
    heads: int
    kv_heads: int
    rope_base: float
    fps: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample whose first frame and first action, which is the state, are conditions."""

    tokens: Tensor  # (T,) int64, of the prompt
    frames: Tensor  # (G, P, C): patches of latent frames
    grid: tuple[int, int]  # rows and columns of patches: P together
    actions: Tensor  # (1 + N, A)
    domain: int
    noisy_frames: bool = True  # after the first
    noisy_actions: bool = True


def train_time(uniform: Tensor, shift: float) -> Tensor:
    """Return times of the distribution `waver`, shifted for the resolution (float64)."""
    u = uniform.double()
    t = 1 - u - 1.29 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    return shift * t / (1 + (shift - 1) * t)


def time_embedding(time: Tensor, width: int = 256) -> Tensor:
    """Embed times in [0, 1] (M,) as cosines, then sines, of frequencies 10000^(-i / (width / 2))."""
    frequencies = torch.tensor([10_000 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angles = time.double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def add_noise(clean: Tensor, noise: Tensor, time: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_t and the velocity noise - clean, both (L, ...); conditions, where `noisy` (L,) is 0, have time 0."""
    t = (time * noisy).view(-1, *[1] * (clean.ndim - 1))
    return t * noise + (1 - t) * clean, noise - clean


def domain_linear(weights: Weights, name: str, x: Tensor, domain: Tensor) -> Tensor:
    """Apply the linear layer of each sample's domain (B,) to (B, L, I); a row of the table is an (I, O) matrix."""
    table, bias = weights[f"{name}.fc.weight"], weights[f"{name}.bias.weight"]
    matrices = torch.stack([table[index].view(x.shape[-1], -1) for index in domain.tolist()])
    return torch.bmm(x, matrices) + bias[domain][:, None]


def noisy_masks(sample: Sample) -> tuple[Tensor, Tensor]:
    """Return which frames (G,) and actions (1 + N,) are noisy, as 0 and 1."""
    frames, actions = torch.zeros(len(sample.frames)), torch.zeros(len(sample.actions))
    frames[1:], actions[1:] = float(sample.noisy_frames), float(sample.noisy_actions)
    return frames, actions


def velocity(weights: Weights, sizes: Sizes, sample: Sample, time: Tensor) -> tuple[Tensor, Tensor]:
    """Predict the velocities of frames (G, P, C) and actions (1 + N, A), 0 where these are conditions, at a time ()."""
    domain = torch.tensor([sample.domain])
    noisy_frames, noisy_actions = noisy_masks(sample)
    embedded = _linear(weights, "time_embedder.mlp.0", time_embedding(time[None]))
    embedded = _linear(weights, "time_embedder.mlp.2", F.silu(embedded))
    video = _linear(weights, "vae2llm", sample.frames) + noisy_frames[:, None, None] * embedded
    actions = domain_linear(weights, "action2llm", sample.actions[None], domain)[0] + weights["action_modality_embed"]
    actions = actions + noisy_actions[:, None] * embedded
    generated = torch.cat((video.flatten(0, 1), actions))
    text = weights["embed_tokens.weight"][sample.tokens]
    text_angles, angles = _positions(sizes, sample)
    for layer in range(sizes.depth):
        keys: list[Tensor] = []
        text = _layer(weights, f"layers.{layer}.", "", sizes, text, text_angles, keys, causal=True)
        generated = _layer(weights, f"layers.{layer}.", "_moe_gen", sizes, generated, angles, keys, causal=False)
    generated = _rms_norm(weights["norm_moe_gen.weight"], generated)
    video, actions = generated.split((len(generated) - len(actions), len(actions)))
    video = _linear(weights, "llm2vae", video).view_as(sample.frames)
    actions = domain_linear(weights, "llm2action", actions[None], domain)[0]
    return video * noisy_frames[:, None, None], actions * noisy_actions[:, None]


def flow_loss(predicted: list[Tensor], targets: list[Tensor], noisy: list[Tensor], widths: list[int]) -> Tensor:
    """Return the mean over samples of squared errors; conditions are in the mean of a sample, with an error of 0.

    Args:
        predicted: (L, ..., A) of each sample.
        targets: likewise.
        noisy: (L,) of each sample, 0 for conditions.
        widths: number of valid dimensions of the last axis, of each sample.
    """
    losses = []
    for velocity_, target, mask, width in zip(predicted, targets, noisy, widths, strict=True):
        errors = (velocity_ - target).square()[..., :width] * mask.view(-1, *[1] * (target.ndim - 1))
        losses.append(errors.mean())
    return torch.stack(losses).mean()


def _positions(sizes: Sizes, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return positions in time, height and width, of the text (T, 3) and of generated tokens (S, 3), in float64.

    Frames and actions start after the text and a margin. A position is 1 / 24 s of video per frame of a latent.
    """
    count, (frames, rows, columns) = len(sample.tokens), (len(sample.frames), *sample.grid)
    text = torch.arange(count, dtype=torch.float64)[:, None].expand(-1, 3)
    latent_rate, action_rate, base_rate = sizes.fps / TEMPORAL_FACTOR, sizes.fps, BASE_FPS / TEMPORAL_FACTOR
    video = torch.cartesian_prod(
        torch.arange(frames, dtype=torch.float64) / latent_rate * base_rate + count + MARGIN,
        torch.arange(rows, dtype=torch.float64),
        torch.arange(columns, dtype=torch.float64),
    )
    action = torch.zeros(len(sample.actions), 3, dtype=torch.float64)
    action[:, 0] = torch.arange(len(action)) / action_rate * base_rate + count + MARGIN
    return text, torch.cat((video, action))


def _layer(
    weights: Weights, prefix: str, suffix: str, sizes: Sizes, x: Tensor, positions: Tensor, keys: list[Tensor], *, causal: bool
) -> Tensor:
    """Apply a layer of Qwen 3 (arXiv:2505.09388) to (L, W).

    `keys` has keys and values of tokens to which these also attend, and gets those of these tokens.
    """

    def weight(name: str) -> Tensor:
        return weights[f"{prefix}{name}{suffix}.weight"]

    normed = _rms_norm(weight("input_layernorm"), x)
    q, k, v = (
        (normed @ weight(f"self_attn.{name}_proj").mT).unflatten(1, (heads, -1)).transpose(0, 1)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
    )
    q = _rotate(_rms_norm(weight("self_attn.q_norm"), q), positions, sizes.rope_base)
    k = _rotate(_rms_norm(weight("self_attn.k_norm"), k), positions, sizes.rope_base)
    if keys:
        k, v = torch.cat((keys[0], k), dim=1), torch.cat((keys[1], v), dim=1)
    keys[:] = [k, v]
    groups = sizes.heads // sizes.kv_heads
    scores = q @ k.repeat_interleave(groups, dim=0).mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    attended = scores.softmax(dim=-1) @ v.repeat_interleave(groups, dim=0)
    x = x + attended.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").mT
    normed = _rms_norm(weight("post_attention_layernorm"), x)
    hidden = F.silu(normed @ weight("mlp.gate_proj").mT) * (normed @ weight("mlp.up_proj").mT)
    return x + hidden @ weight("mlp.down_proj").mT


def _rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate (H, L, D) by positions (L, 3), whose axes are interleaved over the frequencies, as in Qwen3-VL."""
    half = x.shape[-1] // 2
    axis = torch.zeros(half, dtype=torch.long)
    section = half * 5 // 16  # frequencies of height and of width: 20 of 64
    axis[1 : 3 * section : 3], axis[2 : 3 * section : 3] = 1, 2
    frequencies = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = positions[:, axis] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].mT + weights[f"{name}.bias"]


def _rms_norm(weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight
