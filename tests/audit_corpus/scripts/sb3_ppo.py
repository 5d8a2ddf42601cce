"""Stable-Baselines3's PPO on CartPole, then on the same task with a new head."""

import argparse

import torch
from checksums import print_checksums
from stable_baselines3 import PPO

parser = argparse.ArgumentParser()
parser.add_argument("--new-head", action="store_true", help="replace the action head before training goes on")
args = parser.parse_args()

torch.set_num_threads(1)
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=4, seed=0, device="cpu", verbose=0)
if args.new_head:
    policy = model.policy
    policy.action_net = torch.nn.Linear(policy.action_net.in_features, policy.action_net.out_features)
    policy.mlp_extractor.policy_net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
model.learn(total_timesteps=256)
print_checksums(model.policy.parameters(), [])
