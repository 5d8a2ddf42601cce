"""Configurations of lerobot's policies that are drawn at random, as presets of the adapter."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

_MODES = ("IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES")


@dataclass(frozen=True)
class AdapterDrawing:
    """A policy of lerobot with values that replace some of its defaults, and a batch of `samples`."""

    policy: str
    cameras: int
    pixels: int
    dims: int
    config: dict[str, Any]
    samples: int
    sizes: dict[str, Any] | None = None  # of SmolVLA's vision-language model, and of pi0, pi05 and pi0-FAST
    real_dims: int | None = None  # None: all, as lerobot builds a policy without language for the dimensions of its data
    missing: tuple[int, ...] = ()  # numbers of the cameras that no sample has


def draw_adapter(policy: str, seed: int) -> AdapterDrawing:
    """Draw a configuration that lerobot 0.4 and 0.6 can build; of pi0, pi05 and pi0-FAST lerobot 0.6."""
    random = Random(seed)
    draw = {"act": _draw_act, "diffusion": _draw_diffusion, "smolvla": _draw_smolvla}
    values = draw[policy](random) if policy in draw else _draw_pi(random, policy)
    image_mode = random.choice(_MODES[:2]) if policy in ("act", "diffusion") else "IDENTITY"
    modes = {"VISUAL": image_mode, "STATE": random.choice(_MODES), "ACTION": random.choice(_MODES)}
    config = values.pop("config") | ({"normalization_mapping": modes} if random.random() < 0.7 else {})
    # Two samples, because batch norms cannot be trained on a single value of a channel.
    cameras, samples = random.randint(1, 3), random.randint(2, 4)
    if policy not in ("act", "diffusion"):
        config["empty_cameras"] = random.choice([0, 0, 1, 2])
        values["missing"] = tuple(sorted(random.sample(range(cameras), random.randrange(cameras))))
    return AdapterDrawing(policy=policy, cameras=cameras, samples=samples, config=config, **values)


def _draw_act(random: Random) -> dict[str, Any]:
    chunk, heads = random.choice([1, 2, 7, 33]), random.choice([1, 2, 4])
    ensembles = random.random() < 0.2
    config = {
        "chunk_size": chunk,
        "n_action_steps": 1 if ensembles else random.randint(1, chunk),
        "temporal_ensemble_coeff": 0.01 if ensembles else None,
        "vision_backbone": random.choice(["resnet18", "resnet34"]),
        "dim_model": heads * random.choice([8, 16, 24]),
        "n_heads": heads,
        "dim_feedforward": random.randint(5, 100),
        "n_encoder_layers": random.randint(1, 3),
        "n_decoder_layers": random.randint(1, 2),
        "n_vae_encoder_layers": random.randint(1, 2),
        "latent_dim": random.choice([1, 8, 32]),
        "use_vae": random.random() < 0.75,
        "kl_weight": random.choice([0.0, 1.0, 10.0]),
        "pre_norm": random.random() < 0.5,
        "feedforward_activation": random.choice(["relu", "gelu"]),
        "dropout": random.choice([0.0, 0.1]),
    }
    return {"pixels": random.choice([32, 48, 97]), "dims": random.choice([1, 7, 14, 32]), "config": config}


def _draw_diffusion(random: Random) -> dict[str, Any]:
    stages, groups = random.randint(1, 3), random.choice([1, 2, 8])
    observations, horizon = random.randint(1, 3), 2**stages * random.choice([2, 4])
    crop = random.choice([None, [56, 56], [48, 40]])
    config = {
        "n_obs_steps": observations,
        "horizon": horizon,
        "n_action_steps": random.randint(1, horizon - observations + 1),
        "down_dims": [8 * groups * random.choice([1, 2]) for _ in range(stages)],
        "kernel_size": random.choice([3, 5, 7]),
        "n_groups": groups,
        "diffusion_step_embed_dim": random.choice([8, 64]),
        "use_film_scale_modulation": random.random() < 0.5,
        "spatial_softmax_num_keypoints": random.choice([1, 8, 32]),
        "use_separate_rgb_encoder_per_camera": random.random() < 0.5,
        "use_group_norm": random.random() < 0.5,
        "crop_shape": crop,
        "crop_is_random": random.random() < 0.5,
        "noise_scheduler_type": random.choice(["DDPM", "DDIM"]),
        "num_train_timesteps": random.choice([10, 50]),
        "num_inference_steps": random.choice([None, 1, 4]),
        "beta_schedule": random.choice(["squaredcos_cap_v2", "linear", "scaled_linear"]),
        "prediction_type": random.choice(["epsilon", "sample"]),
        "clip_sample": random.random() < 0.7,
        "clip_sample_range": random.choice([1.0, 2.0]),
        "do_mask_loss_for_padding": random.random() < 0.5,
    }
    return {"pixels": random.choice([64, 72]), "dims": random.choice([1, 7, 14]), "config": config}


def _draw_smolvla(random: Random) -> dict[str, Any]:
    heads, layers = random.choice([2, 4, 6]), random.randint(2, 5)
    patch, scale, vision_heads = random.choice([8, 16]), random.choice([1, 2]), random.randint(1, 3)
    pixels, dims, chunk = patch * scale * random.randint(1, 3), random.choice([8, 32]), random.choice([1, 2, 16])
    used_layers = random.randint(1, layers)
    attention = random.choice(["cross_attn", "self_attn"])
    # lerobot cannot act with self-attention and fewer layers in the expert.
    expert_layers = [count for count in range(1, used_layers + 1) if used_layers % count == 0 and attention == "cross_attn"]
    config = {
        "chunk_size": chunk,
        "n_action_steps": random.randint(1, chunk),
        "num_vlm_layers": used_layers,
        "num_expert_layers": random.choice([-1, *expert_layers]),
        "self_attn_every_n_layers": random.choice([-1, 1, 2, 3]),
        "expert_width_multiplier": random.choice([0.5, 0.75, 1.0]),
        "attention_mode": attention,
        "num_steps": random.choice([1, 3, 10]),
        "tokenizer_max_length": random.choice([4, 48]),
        "max_period": random.choice([2.0, 4.0]),
        "train_expert_only": random.random() < 0.6,
        "freeze_vision_encoder": random.random() < 0.6,
        "train_state_proj": random.random() < 0.7,
        "prefix_length": random.choice([-1, 200]),
    }
    head_dim = random.choice([8, 16])
    text = {
        "model_type": "llama",
        "hidden_size": heads * head_dim,
        "intermediate_size": random.randint(20, 150),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        "head_dim": head_dim,
        "vocab_size": 384,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": vision_heads * 16,
        "intermediate_size": random.randint(20, 90),
        "num_hidden_layers": random.randint(1, 2),
        "num_attention_heads": vision_heads,
        "image_size": pixels,
        "patch_size": patch,
    }
    sizes = {"scale_factor": scale, "text_config": text, "vision_config": vision}
    return {"pixels": pixels, "dims": dims, "real_dims": random.randint(1, dims), "sizes": sizes, "config": config}


def _draw_pi(random: Random, policy: str) -> dict[str, Any]:
    vision_heads, patch, chunk = random.randint(1, 3), random.choice([4, 7, 16]), random.choice([1, 2, 7, 33])
    dims, prompt_tokens = random.choice([8, 32]), random.choice([1, 17, 48])
    sizes = {
        # 8 heads are written into lerobot's attention.
        "backbone": {
            "width": random.choice([8, 36, 72]),
            "depth": random.randint(1, 3),
            "mlp_dim": random.randint(4, 100),
            "num_heads": 8,
            "num_kv_heads": random.choice([1, 2, 8]),
            "head_dim": random.choice([2, 8, 16]),
        },
        "expert": {"width": random.choice([4, 18, 32]), "mlp_dim": random.randint(4, 60)},
        "vision": {
            "hidden_size": vision_heads * random.choice([8, 16]),
            "num_hidden_layers": random.randint(1, 2),
            "num_attention_heads": vision_heads,
            "intermediate_size": random.randint(5, 70),
            "patch_size": patch,
        },
        "vocabulary": random.choice([700, 1024]),
    }
    config = {
        "chunk_size": chunk,
        "n_action_steps": random.randint(1, chunk),
        "tokenizer_max_length": prompt_tokens,
    }
    if policy == "pi0_fast":
        config |= {"max_action_tokens": random.choice([3, 40]), "fast_skip_tokens": random.choice([0, 100])}
    else:
        config |= {
            "num_inference_steps": random.choice([1, 3, 10]),
            "min_period": random.choice([4e-3, 1e-2]),
            "max_period": random.choice([2.0, 4.0]),
            "freeze_vision_encoder": random.random() < 0.3,
            "train_expert_only": random.random() < 0.3,
        }
    pixels = patch * random.randint(1, 3) + random.randrange(patch)
    return {"pixels": pixels, "dims": dims, "real_dims": random.randint(1, dims), "sizes": sizes, "config": config}
