"""Every case of the corpus. About half of them are clean, and half have one plausible mistake."""

from __future__ import annotations

from tests.audit_corpus.cases import ACCELERATE, OF_16_BIT_WEIGHTS, TORCHRUN, cast, clean, mistaken

HALF = ("--dtype", "bfloat16")
DEEPSPEED = ("deepspeed", "--num_gpus", "2", "--master_port", "29619", "deepspeed_train.py", "--deepspeed_config")
ACCELERATE_DEEPSPEED = (*ACCELERATE, "accelerate_deepspeed.py", "--deepspeed-config")
BY_ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true"}
OPTIMIZER_OVER_A_COPY = "the optimizer holds an old copy of the model"
# Moments in 16 bits may be judged beside weights in 16 bits, or the scaling of float16.
OF_FLOAT16 = ("BXP101", *OF_16_BIT_WEIGHTS)

TORCH = (
    clean("plain", "python", "plain.py", ci=True),
    clean("plain_autocast", "python", "plain.py", "--autocast", ci=True),
    cast("plain_bf16", "python", "plain.py", *HALF, ci=True, repair="torch.autocast"),
    mistaken(
        "plain_default_dtype",
        "bfloat16 is the default dtype",
        "BXP603",
        "python",
        "plain.py",
        "--default-dtype",
        "bfloat16",
        ci=True,
    ),
    clean("two_stages", "sh", "two_stages.sh"),
    cast("two_stages_bf16", "sh", "two_stages.sh", *HALF),
    clean("gan", "python", "gan.py", ci=True),
    mistaken(
        "gan_clips_late",
        "gradients are clipped after the step",
        "BXP304",
        "python",
        "gan.py",
        "--clip-late",
        ci=True,
        repair="right before optimizer.step()",
    ),
    mistaken("gan_swapped", "no optimizer holds the generator", "BXP404", "python", "gan.py", "--swap", ci=True),
    clean("lbfgs", "python", "closures.py", "lbfgs", ci=True),
    cast("lbfgs_bf16", "python", "closures.py", "lbfgs", *HALF, ci=True),
    clean("sam", "python", "closures.py", "sam", ci=True),
    cast("sam_bf16", "python", "closures.py", "sam", *HALF, opaque=True, ci=True),
    clean("compiled_model", "python", "compiled.py", "model"),
    cast("compiled_model_bf16", "python", "compiled.py", "model", *HALF),
    clean("compiled_optimizer", "python", "compiled.py", "optimizer", unobserved=True),
    clean("compiled_step", "python", "compiled.py", "step", unobserved=True),
    clean("grad_scaler", "python", "grad_scaler.py", ci=True),
    mistaken(
        "grad_scaler_clips_scaled", "clipped before unscale_", "BXP304", "python", "grad_scaler.py", "--clip-scaled", ci=True
    ),
    mistaken("grad_scaler_forgotten", "float16 without a scaler", "BXP305", "python", "grad_scaler.py", "--no-scaler", ci=True),
    clean("accumulation", "python", "accumulation.py", ci=True),
    mistaken(
        *("accumulation_fast_schedule", "the schedule advances with every micro-batch", "BXP403"),
        *("python", "accumulation.py", "--schedule-per-micro-batch"),
        ci=True,
    ),
    mistaken(
        *("accumulation_no_schedule", "a warm-up from zero never advances: nothing moves", "BXP401"),
        *("python", "accumulation.py", "--forget-schedule"),
        ci=True,
    ),
    clean("ema", "python", "ema.py", ci=True),
    mistaken("ema_bf16", "an EMA in bfloat16 never moves", "BXP107", "python", "ema.py", "--ema-dtype", "bfloat16", ci=True),
    clean("wiring", "python", "wiring.py", ci=True),
    mistaken("wiring_old_model", OPTIMIZER_OVER_A_COPY, "BXP404", "python", "wiring.py", "--optimizer-first", ci=True),
    mistaken(
        "wiring_no_head", "no optimizer holds the head", "BXP404", "python", "wiring.py", "--forget-head", info=True, ci=True
    ),
    clean("resume", "python", "resume.py", ci=True),
    mistaken(
        "resume_without_masters", "masters from 16-bit weights", "BXP501", "python", "resume.py", "--forget-masters", ci=True
    ),
    mistaken(
        "masters_copied_late", "the forward pass reads old weights", "BXP104", "python", "resume.py", "--copy-late", ci=True
    ),
    clean("python_m", "python", "-m", "policy.train", ci=True),
    mistaken("python_m_normalizer", "statistics in bfloat16", "BXP602", "python", "-m", "policy.train", "--cast-all", ci=True),
    clean("in_backward", "python", "in_backward.py", ci=True),
    cast("in_backward_bf16", "python", "in_backward.py", *HALF, ci=True),
    clean("own_muon", "python", "own_optimizers.py", "muon", ci=True),
    cast("own_muon_bf16", "python", "own_optimizers.py", "muon", *HALF, ci=True, opaque=True),
    clean("own_clipping", "python", "own_optimizers.py", "clipping", ci=True),
    cast("own_clipping_bf16", "python", "own_optimizers.py", "clipping", *HALF, opaque=True, ci=True),
    clean("loader_fork", "python", "loaders.py", "fork"),
    clean("loader_spawn", "python", "loaders.py", "spawn"),
    clean("loader_forkserver", "python", "loaders.py", "forkserver"),
    cast("loader_forkserver_bf16", "python", "loaders.py", "forkserver", "--half-weights"),
    clean("adafactor", "python", "optimizers.py", "adafactor"),
    cast("adafactor_bf16", "python", "optimizers.py", "adafactor", *HALF),
    clean("optimi_kahan", "python", "optimizers.py", "optimi", *HALF, ci=True),
    mistaken(
        *("optimi_kahan_decay", "the weight decay is outside of the Kahan sum", "BXP106"),
        *("python", "optimizers.py", "optimi", *HALF, "--weight-decay", "0.01"),
        ci=True,
    ),
    clean("torchao_8bit", "python", "optimizers.py", "torchao"),
    clean("torchao_4bit", "python", "optimizers.py", "torchao_4bit"),
    # Weights are rounded stochastically, and moments of tensors below 4096 elements to the nearest bfloat16.
    mistaken(
        *("torchao_stochastic", "moments of small tensors are bfloat16", "BXP201"),
        *("python", "optimizers.py", "torchao_stochastic", *HALF),
        also=("BXP202",),
    ),
    cast("torchao_8bit_bf16", "python", "optimizers.py", "torchao", *HALF, opaque=True),
    clean("uv_run", "uv", "run", "--no-project", "plain.py", environment="uv"),
    cast("uv_run_bf16", "uv", "run", "--no-project", "plain.py", *HALF, environment="uv"),
)

RANKS = (
    clean("ddp", *TORCHRUN, "ddp.py"),
    clean("ddp_compressed", *TORCHRUN, "ddp.py", "--compress"),
    cast("ddp_bf16", *TORCHRUN, "ddp.py", *HALF),
    clean("two_nodes", "sh", "two_nodes.sh", "ddp.py"),
    cast("two_nodes_bf16", "sh", "two_nodes.sh", "ddp.py", *HALF),
    clean("spawned", "python", "spawned.py"),
    cast("spawned_bf16", "python", "spawned.py", *HALF),
    clean("titan", *TORCHRUN, "titan.py"),
    cast("titan_bf16", *TORCHRUN, "titan.py", "--model-dtype", "bfloat16", repair="MixedPrecisionPolicy"),
    mistaken("titan_optimizer_first", OPTIMIZER_OVER_A_COPY, "BXP404", *TORCHRUN, "titan.py", "--optimizer-first"),
    clean("accelerate_ddp", *ACCELERATE, "accelerate_ddp.py"),
    clean("accelerate_ddp_bf16_autocast", *ACCELERATE, "accelerate_ddp.py", "--mixed-precision", "bf16"),
    mistaken(
        *("accelerate_unprepared", "the optimizer steps on every micro-batch", "BXP402 BXP403 BXP407"),
        *(*ACCELERATE, "accelerate_ddp.py", "--forget-optimizer"),
    ),
    clean("accelerate_fsdp2", *ACCELERATE, "accelerate_fsdp2.py"),
    cast(
        *("accelerate_fsdp2_bf16", *ACCELERATE, "accelerate_fsdp2.py", "--model-dtype", "bfloat16", "--mixed-precision", "no"),
        repair="Accelerator(mixed_precision=",
    ),
    clean("accelerate_deepspeed", *ACCELERATE_DEEPSPEED, "ds_zero2.json", variables=BY_ACCELERATE),
    cast(
        "accelerate_deepspeed_bf16_states",
        *ACCELERATE_DEEPSPEED,
        "ds_bf16_states.json",
        variables=BY_ACCELERATE,
        repair="bf16_master_weights_and_grads",
    ),
    clean("deepspeed_zero2", *DEEPSPEED, "ds_zero2.json"),
    clean("deepspeed_zero3", *DEEPSPEED, "ds_zero3.json"),
    cast("deepspeed_bf16_states", *DEEPSPEED, "ds_bf16_states.json", repair="bf16_master_weights_and_grads"),
    mistaken(
        *("deepspeed_late_weights", "weights are loaded behind the masters' back", "BXP504"),
        *(*DEEPSPEED, "ds_zero2.json", "--load-weights-late"),
    ),
)

LIBRARIES = (
    clean("trainer", "python", "hf_trainer.py"),
    clean("trainer_bf16_autocast", "python", "hf_trainer.py", "--bf16"),
    clean("trainer_accumulation", "python", "hf_trainer.py", "--gradient-accumulation-steps", "2"),
    clean("trainer_adafactor", "python", "hf_trainer.py", "--optim", "adafactor"),
    cast("trainer_bf16", "python", "hf_trainer.py", *HALF, repair="bf16=True in TrainingArguments"),
    cast("trainer_bf16_both", "python", "hf_trainer.py", *HALF, "--bf16"),
    cast("trainer_adafactor_bf16", "python", "hf_trainer.py", *HALF, "--optim", "adafactor"),
    clean("lightning_32", "python", "lightning_train.py", environment="lightning"),
    clean("lightning_16_mixed", "python", "lightning_train.py", "--precision", "16-mixed", environment="lightning"),
    clean("lightning_bf16_mixed", "python", "lightning_train.py", "--precision", "bf16-mixed", environment="lightning"),
    clean("lightning_gan", "python", "lightning_gan.py", environment="lightning"),
    cast(
        "lightning_bf16_true",
        "python",
        "lightning_train.py",
        "--precision",
        "bf16-true",
        environment="lightning",
        repair="bf16-mixed",
    ),
    mistaken(
        *("lightning_16_true", "float16 without a scaler", "BXP305"),
        *("python", "lightning_train.py", "--precision", "16-true"),
        also=OF_FLOAT16,
        environment="lightning",
        repair="16-mixed",
    ),
    mistaken(
        *("lightning_copy", OPTIMIZER_OVER_A_COPY, "BXP404", "python", "lightning_train.py", "--optimizer-over-copy"),
        environment="lightning",
    ),
    clean("trl_sft", "python", "trl_sft.py", environment="trl"),
    clean("trl_sft_bf16_autocast", "python", "trl_sft.py", "--bf16", environment="trl"),
    cast("trl_sft_bf16", "python", "trl_sft.py", *HALF, environment="trl", repair="bf16=True in TrainingArguments"),
    clean("peft_lora", "python", "peft_lora.py", environment="peft"),
    cast("peft_lora_bf16", "python", "peft_lora.py", "--no-autocast-adapters", environment="peft"),
    clean("sb3_ppo", "python", "sb3_ppo.py", environment="stable-baselines3"),
    mistaken(
        *("sb3_ppo_new_head", "the optimizer holds the replaced layers", "BXP404", "python", "sb3_ppo.py", "--new-head"),
        environment="stable-baselines3",
    ),
    clean("diffusers_unet", "python", "diffusers_unet.py", environment="diffusers"),
    clean("diffusers_unet_autocast", "python", "diffusers_unet.py", "--mixed-precision", "bf16", environment="diffusers"),
    cast(
        "diffusers_unet_bf16",
        "python",
        "diffusers_unet.py",
        "--mixed-precision",
        "bf16",
        "--cast-unet",
        environment="diffusers",
    ),
    clean("bitsandbytes", "python", "optimizers.py", "bitsandbytes", environment="optimizers"),
    cast("bitsandbytes_bf16", "python", "optimizers.py", "bitsandbytes", *HALF, environment="optimizers", opaque=True),
    clean("lion", "python", "optimizers.py", "lion", environment="optimizers"),
    cast("lion_bf16", "python", "optimizers.py", "lion", *HALF, environment="optimizers", opaque=True),
    clean("schedulefree", "python", "optimizers.py", "schedulefree", environment="optimizers"),
    cast("schedulefree_bf16", "python", "optimizers.py", "schedulefree", *HALF, environment="optimizers", opaque=True),
    clean(
        "lerobot_act",
        "sh",
        "lerobot_act.sh",
        environment="lerobot",
        outputs=("out/checkpoints/*/pretrained_model/*.safetensors",),
    ),
    clean("lerobot_loop", "python", "lerobot_own_loop.py", environment="lerobot"),
    cast("lerobot_loop_bf16", "python", "lerobot_own_loop.py", *HALF, environment="lerobot", repair="torch.autocast"),
)

CASES = (*TORCH, *RANKS, *LIBRARIES)
if len({case.name for case in CASES}) != len(CASES):
    raise ValueError("two cases have the same name")
