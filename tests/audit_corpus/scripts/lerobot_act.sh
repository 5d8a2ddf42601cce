#!/bin/sh
# lerobot-train with ACT on a dataset recorded a moment before.
set -e
python lerobot_dataset.py data
exec python lerobot_train.py --dataset.repo_id=corpus/tiny --dataset.root=data --policy.type=act --policy.push_to_hub=false \
    --policy.pretrained_backbone_weights=null --policy.device=cpu --policy.dim_model=32 --policy.dim_feedforward=64 \
    --policy.n_heads=2 --policy.n_encoder_layers=1 --policy.n_vae_encoder_layers=1 --policy.chunk_size=8 --policy.n_action_steps=8 \
    --batch_size=2 --steps=22 --num_workers=0 --seed=1 --save_freq=22 --log_freq=1 --eval_freq=0 --wandb.enable=false \
    --output_dir=out "$@"
