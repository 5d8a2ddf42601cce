"""Normalisation of observations and actions by statistics of the dataset."""

from torch import nn


class Normalizer(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.register_buffer("obs_mean", observations.mean(0))
        self.register_buffer("obs_std", observations.std(0))
        self.action_min = nn.Parameter(actions.amin(0), requires_grad=False)
        self.action_max = nn.Parameter(actions.amax(0), requires_grad=False)

    def observation(self, value):
        return (value - self.obs_mean) / self.obs_std

    def action(self, value):
        return 2.0 * (value - self.action_min) / (self.action_max - self.action_min) - 1.0
