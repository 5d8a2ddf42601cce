"""VITRA's formulas: noise schedule, diffusion transformer, sampling, loss and prefix.

Written from the facts of microsoft/VITRA and the papers that it cites. Parameters have its names and shapes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Weights = Mapping[str, Tensor]
    Parts = Mapping[str, tuple[int, int, float]]

# First and last dimension, and weight: for human hands, and for robots.
HUMAN = {"left_6d": (0, 6, 1.0), "left_joints": (6, 51, 1.0), "right_6d": (51, 57, 1.0), "right_joints": (57, 102, 1.0)}
ROBOT = {name: (start, stop, 1.6 if name.endswith("6d") else 0.4) for name, (start, stop, _) in HUMAN.items()}


def schedule(timesteps: int) -> list[float]:
    """Return alpha_bar of each timestep, with betas by the squared cosine (arXiv:2102.09672, equation 17), in Python floats."""

    def signal(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    alpha_bars, alpha_bar = [], 1.0
    for step in range(timesteps):
        alpha_bar *= 1 - min(1 - signal((step + 1) / timesteps) / signal(step / timesteps), 0.999)
        alpha_bars.append(alpha_bar)
    return alpha_bars


def add_noise(x_0: Tensor, noise: Tensor, timestep: Tensor, timesteps: int) -> Tensor:
    """Return x_t (M, N, A) of M chunks at the timesteps (M,) (arXiv:2006.11239, equation 4)."""
    alpha_bar = torch.tensor(schedule(timesteps), dtype=torch.float64)[timestep][:, None, None]
    return (alpha_bar.sqrt() * x_0 + (1 - alpha_bar).sqrt() * noise).float()


def ddim(epsilon: Callable[[Tensor, int], Tensor], noise: Tensor, timesteps: int, steps: int) -> Tensor:
    """Sample by DDIM with eta 0 over a schedule of its own betas (arXiv:2010.02502, equation 12), every n-th timestep."""
    taken = list(range(0, timesteps, timesteps // steps))
    full, spaced, previous = schedule(timesteps), [], 1.0
    for timestep in taken:  # betas of the shorter schedule, multiplied up again
        beta = 1 - full[timestep] / previous
        spaced.append((spaced[-1] if spaced else 1.0) * (1 - beta))
        previous = full[timestep]
    x = noise.double()
    for index in range(len(taken) - 1, -1, -1):
        alpha_bar, alpha_bar_prev = spaced[index], spaced[index - 1] if index else 1.0
        predicted = epsilon(x.float(), taken[index]).double()
        x_0 = math.sqrt(1 / alpha_bar) * x - math.sqrt(1 / alpha_bar - 1) * predicted
        direction = (math.sqrt(1 / alpha_bar) * x - x_0) / math.sqrt(1 / alpha_bar - 1)
        x = math.sqrt(alpha_bar_prev) * x_0 + math.sqrt(1 - alpha_bar_prev) * direction
    return x.float()


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Guidance without a classifier (arXiv:2207.12598)."""
    return unconditional + scale * (conditional - unconditional)


def time_embedding(timestep: Tensor, width: int = 256) -> Tensor:
    """Embed timesteps (M,) as cosines, then sines, of frequencies 10000^(-i / (width / 2))."""
    frequencies = torch.tensor([10_000 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angles = timestep.double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def dit(weights: Weights, heads: int, x: Tensor, timestep: Tensor, condition: Tensor, state: Tensor) -> Tensor:
    """Predict noise (M, N, A) by a transformer over condition, state and actions (arXiv:2212.09748).

    Args:
        weights: of the transformer.
        heads: of attention.
        x: (M, N, 2 A), masked noisy actions and their mask.
        timestep: (M,).
        condition: (M, C).
        state: (M, 2 S), masked state and its mask.
    """
    z = _linear(weights, "z_embedder.linear", condition)
    t = _mlp(weights, ("t_embedder.mlp.0", "t_embedder.mlp.2"), time_embedding(timestep), F.silu)
    s = _mlp(weights, [f"state_embedder.projector.{i}" for i in (0, 2, 4)], state, F.gelu)
    actions = _mlp(weights, ("x_embedder.projector.0", "x_embedder.projector.2"), x, F.gelu)
    c = F.silu(z + t)
    tokens = torch.cat((z[:, None], s[:, None], actions), dim=1) + weights["positional_embedding"]
    for layer in range(sum(name.endswith(".attn.qkv.weight") for name in weights)):
        tokens = _block({name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}, heads, tokens, c)
    shift, scale = _linear(weights, "final_layer.adaLN_modulation.1", c)[:, None].chunk(2, dim=-1)
    return _linear(weights, "final_layer.linear", _layer_norm(tokens) * (1 + scale) + shift)[:, -x.shape[1] :]


def _block(weights: Weights, heads: int, x: Tensor, c: Tensor) -> Tensor:
    """Apply one layer with adaLN-Zero modulation and causal attention over normed queries and keys."""
    modulation = _linear(weights, "adaLN_modulation.1", c)[:, None]
    shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=-1)
    normed = _layer_norm(x) * (1 + scale_attention) + shift_attention
    q, k, v = _linear(weights, "attn.qkv", normed).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (_rms_norm(part) * weights[f"attn.{name}.weight"] for part, name in ((q, "q_norm"), (k, "k_norm")))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
    x = x + gate_attention * _linear(weights, "attn.proj", attended.transpose(1, 2).flatten(2))
    hidden = F.gelu(_linear(weights, "mlp.fc1", _layer_norm(x) * (1 + scale_mlp) + shift_mlp), approximate="tanh")
    return x + gate_mlp * _linear(weights, "mlp.fc2", hidden)


def part_losses(
    predicted: Tensor, noise: Tensor, mask: Tensor, parts: Mapping[str, tuple[int, int, float]]
) -> dict[str, Tensor]:
    """Return the mean squared error of each part over all valid elements of the batch; a part without any is left out."""
    errors = (predicted - noise).square() * mask
    return {
        name: errors[..., start:stop].sum() / mask[..., start:stop].sum()
        for name, (start, stop, _) in parts.items()
        if mask[..., start:stop].any()
    }


def loss(predicted: Tensor, noise: Tensor, mask: Tensor, parts: Parts) -> Tensor:
    """Weight the losses of the parts by their steps in the whole batch, and by the weight of the part.

    Args:
        predicted: (M, N, A).
        noise: (M, N, A).
        mask: (M, N, A), 1 for valid elements. A part is valid at a step if its first dimension is.
        parts: first and last dimension, and weight.
    """
    losses = part_losses(predicted, noise, mask, parts)
    steps = {name: mask[..., parts[name][0]].sum() for name in losses}
    return sum(parts[name][2] * losses[name] * steps[name] for name in losses) / sum(steps.values())


def prefix(images: Tensor, words: Tensor, view: Tensor, cognition: Tensor) -> Tensor:
    """Return the inputs of Gemma 2's first layer (B, L, W).

    Gemma 2 multiplies all embeddings that it is passed by sqrt(W). PaliGemma divides projected images by it before.

    Args:
        images: (B, I, W), projected.
        words: (B, T, W), rows of the embedding table.
        view: (B, W), the encoded field of view.
        cognition: (W,), learned.
    """
    root = math.sqrt(words.shape[-1])
    tokens = (images / root, words, view[:, None], cognition.expand(len(words), 1, -1))
    return torch.cat(tokens, dim=1) * root


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].mT + weights[f"{name}.bias"]


def _mlp(weights: Weights, names: tuple[str, ...] | list[str], x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    for name in names[:-1]:
        x = activation(_linear(weights, name, x))
    return _linear(weights, names[-1], x)


def _layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, correction=0, keepdim=True) + 1e-6).sqrt()


def _rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
