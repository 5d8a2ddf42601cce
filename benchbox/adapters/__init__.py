"""Adapters: any `nn.Module` as a policy. `benchbox.adapt` is the entry; the rest is observed on the module."""

from benchbox.adapters.adapt import adapt
from benchbox.adapters.policy import AdaptedPolicy

__all__ = ["AdaptedPolicy", "adapt"]
